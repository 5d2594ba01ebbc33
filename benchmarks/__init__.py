"""Measurements that anyone can repeat: `make bench`, or one of them as `python -m benchmarks.seeds`.

Each writes its figures, with the machine and the versions they were taken on, to `docs/benchmarks/NAME.json`, and its
part of `docs/benchmarks.md`.
"""
