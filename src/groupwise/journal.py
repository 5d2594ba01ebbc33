"""`metrics.jsonl`: a record a line, which the trackers hear of, too, and of which a resumed run keeps the beginning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from groupwise.errors import CheckpointError
from groupwise.files import append, whole_lines, write_whole
from groupwise.metrics import Metrics
from groupwise.trackers import Tracker


class Journal:
    """The records of one run; a line appears only when it is whole."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.path = folder / "metrics.jsonl"
        self._trackers = trackers

    def write(self, record: Mapping[str, float]) -> None:
        """Append a record, which says its `step`; a number that is not finite is null.

        Raises:
            CheckpointError: it cannot be written.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        append(self.path, json.dumps(finite))
        numbers = {name: value for name, value in finite.items() if value is not None and name != "step"}
        for tracker in self._trackers:
            tracker.log(int(record["step"]), numbers)

    def keep(self, stays: Callable[[Mapping[str, float]], bool]) -> list[Metrics]:
        """Forget the other records, and a last line that was cut short; those that stay.

        Raises:
            CheckpointError: a line is no record.
        """
        whole = whole_lines(self.path)
        records = [self._read(number, line) for number, line in enumerate(whole, 1)]
        kept = [(line, record) for line, record in zip(whole, records, strict=True) if stays(record)]
        write_whole(self.path, "".join(line for line, _ in kept).encode())
        return [record for _, record in kept]

    def _read(self, number: int, line: str) -> Metrics:
        try:
            record = json.loads(line)
            return {**record, "step": int(record["step"])}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: line {number} is damaged; delete that line to continue without it"
            ) from error

    def close(self) -> None:
        """End what the trackers write."""
        for tracker in self._trackers:
            tracker.close()
