"""How often the math reward is right: writes that section of docs/rewards.md from tests/data/answer_pairs.jsonl.

Each pair has a reference, an answer, and whether mathematics calls them equal.  Three verifiers see both in a box: our
reward, math-verify alone with its default settings, and the comparison of the two strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from math_verify import parse, verify

from groupwise.rewards.math import same_answer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rewards.md"
PAIRS = ROOT / "tests" / "data" / "answer_pairs.jsonl"
BEGIN = "<!-- Made by `make docs` from tests/data/answer_pairs.jsonl; do not edit. -->"
END = "<!-- end of the answer pairs -->"


class Pair(NamedTuple):
    """One line of the file, and what each verifier says."""

    kind: str
    reference: str
    answer: str
    equal: bool
    held_out: bool
    verdicts: Mapping[str, bool]


def ours(reference: str, answer: str) -> bool:
    """The math reward; an answer that it refuses to evaluate is not rewarded."""
    try:
        return same_answer(reference, answer)
    except ValueError:
        return False


def math_verify_alone(reference: str, answer: str) -> bool:
    """`verify(parse(...), parse(...))`, both in a box."""
    return bool(verify(parse(rf"\boxed{{{reference}}}"), parse(rf"\boxed{{{answer}}}")))


def same_string(reference: str, answer: str) -> bool:
    return reference.strip() == answer.strip()


VERIFIERS: dict[str, Callable[[str, str], bool]] = {
    "ours": ours,
    "math-verify": math_verify_alone,
    "string": same_string,
}


def judged() -> list[Pair]:
    """Every pair with its verdicts."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    return [
        Pair(**row, verdicts={name: verifier(row["reference"], row["answer"]) for name, verifier in VERIFIERS.items()})
        for row in rows
    ]


def missed(pairs: Sequence[Pair], name: str) -> int:
    """Right answers that the verifier does not reward."""
    return sum(pair.equal and not pair.verdicts[name] for pair in pairs)


def fooled(pairs: Sequence[Pair], name: str) -> int:
    """Wrong answers that the verifier rewards."""
    return sum(pair.verdicts[name] and not pair.equal for pair in pairs)


def section(pairs: Sequence[Pair]) -> str:
    """The part of the page between the two marks."""
    return "\n".join([*_counts(pairs), "", *_mistakes(pairs), "", *_all_pairs(pairs)])


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _counts(pairs: Sequence[Pair]) -> Iterator[str]:
    tuned, held_out = ([pair for pair in pairs if pair.held_out == held] for held in (False, True))
    heads = [f"{name}: {what}" for name in VERIFIERS for what in ("missed", "fooled")]
    yield _row("kind", "equal", "unequal", *heads)
    yield "| --- |" + " ---: |" * (2 + len(heads))
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        yield _counted(kind, [pair for pair in tuned if pair.kind == kind])
    yield _counted("**all**", tuned)
    yield _counted("**held out**", held_out)


def _counted(title: str, pairs: Sequence[Pair]) -> str:
    errors = [count(pairs, name) for name in VERIFIERS for count in (missed, fooled)]
    return _row(title, sum(pair.equal for pair in pairs), sum(not pair.equal for pair in pairs), *errors)


def _mistakes(pairs: Sequence[Pair]) -> Iterator[str]:
    wrong = [pair for pair in pairs if pair.verdicts["ours"] != pair.equal]
    yield f"Where ours is wrong ({len(wrong)} of {len(pairs)}):\n" if wrong else "Ours is wrong on none of them."
    for pair in wrong:
        yield f"* {_code(pair.answer)} for {_code(pair.reference)}: {'missed' if pair.equal else 'fooled'}" + (
            " (held out)" if pair.held_out else ""
        )


def _all_pairs(pairs: Sequence[Pair]) -> Iterator[str]:
    yield f"<details>\n<summary>All {len(pairs)} pairs, with the three verdicts</summary>\n"
    yield _row("kind", "reference", "answer", "truth", *VERIFIERS, "held out")
    yield "| --- | --- | --- |" + " :---: |" * (2 + len(VERIFIERS))
    for pair in pairs:
        said = [
            f"{'=' if says else '≠'}{'' if says == pair.equal else ' **wrong**'}" for says in pair.verdicts.values()
        ]
        truth = "=" if pair.equal else "≠"
        yield _row(pair.kind, _code(pair.reference), _code(pair.answer), truth, *said, "yes" if pair.held_out else "")
    yield "\n</details>"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else "(empty)"


def page(pairs: Sequence[Pair], text: str) -> str:
    """The page with its section made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has lost its marks"
    return f"{before}{begin}\n\n{section(pairs)}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(judged(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
