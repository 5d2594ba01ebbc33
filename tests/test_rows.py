"""Every format gives the same rows, and a file that cannot be read is located."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from groupwise.errors import DataError
from groupwise.rows import read_rows

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(20)]


def fails(pattern: str) -> Any:
    return pytest.raises(DataError, match=pattern)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert read_rows(file) == ROWS, file
        assert read_rows(str(file), limit=3) == ROWS[:3]


def test_messages_survive_parquet(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "2+2?"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows


def test_a_missing_file_names_its_sibling(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with fails(
        r"data\.path: .*trian\.jsonl: no such file \(did you mean .*train\.jsonl\?\); accepted: a \.jsonl.*Hub id"
    ):
        read_rows(tmp_path / "trian.jsonl")


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with fails(r"a\.txt: unknown suffix '\.txt'; accepted: \.jsonl, \.json, \.csv, \.parquet"):
        read_rows(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": b}\n',
            r"a\.jsonl, line 2, column 12: not JSON .*'{\"prompt\": b}'.*one JSON",
        ),
        ("a.jsonl", '{"prompt": "a"}\n\n[1]\n', r"a\.jsonl, line 3: is the list \[1\]; accepted: an object"),
        ("a.json", '[{"prompt": "a"},\n}]', r"a\.json, line 2, column 1: not JSON .*belongs in a \.jsonl file"),
        ("a.json", '{"prompt": "a"}', r"a\.json: holds one dict; accepted: a list of objects"),
        ("a.json", "[3]", r"a\.json, \[0\]: is the int 3; accepted: an object"),
        ("a.parquet", "PAR", r"a\.parquet: not a Parquet file: .*accepted"),
        ("a.jsonl", "\n", r"a\.jsonl: it has no rows; accepted: at least one row"),
        ("a.json", "[]", r"a\.json: it has no rows"),
        ("a.csv", "prompt,answer\n", r"a\.csv: it has no rows"),
    ],
)
def test_a_damaged_file_is_located(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with fails(message):
        read_rows(tmp_path / name)


def test_a_hub_id_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, configuration, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_rows("org/sums", limit=2) == ROWS[:2]
    assert read_rows("org/sums:hard", split="test") == ROWS
    assert asked == [("org/sums", None, "train"), ("org/sums", "hard", "test")]


def test_a_hub_id_that_cannot_be_had_says_so() -> None:
    with fails(r"data\.path: org/sums, split 'train': no such file, and the Hub does not give it: .*accepted: a file"):
        read_rows("org/sums")
