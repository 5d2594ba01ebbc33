"""A comparison as tables of text, `{title, note, columns, rows, ...}`: the terminal and the report show the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import CheckpointError

Json = dict[str, Any]
CLASSES = {
    "short": "short",
    "middling": "middling",
    "long": "long",
    "right": "right",
    "wrong": "wrong",
    "hard": "hard prompts",
    "early": "first third",
    "midway": "second",
    "late": "last",
}
"""The classes of tokens, with the heads of their columns."""
_UPDATE = ["algorithm", "advantage", "spread", "zero", "as the run's", "push", "gradient", "clipped", "silenced"]
_FAVOURS = ["algorithm", *CLASSES.values(), "length slope"]
_ABOUT_UPDATE = (
    "Advantages: their mean over completions and their spread, the share that is zero, and the correlation with those "
    "that the run had. Push: -dL/d log π of the tokens, at ratio 1; gradient: what that is for the weights; both as L2 "
    "norms, relative to the run's."
)
_ABOUT_CLIPPING = (
    "At ratio 1 nothing is clipped. Clipped (tokens beyond the clip of the policy term) and silenced (pushed "
    "tokens that are pushed no more) are at the ratio of other log-probs to the stored ones:"
)
_ABOUT_FAVOURS = (
    "Which tokens get the push: shares of the sum of its absolute values, with the share that they are of all tokens. "
    "Completions are short, middling or long by the thirds of all lengths; on a hard prompt less than half is right; "
    "the thirds are those of each completion. Length slope: that of log(|push| / |advantage|) of a token over the log "
    "of its completion's length. At -1 a token of a completion twice as long counts half (1/|o|), at 0 as much."
)


def result_file(run: Path, step: int) -> Path:
    """Where a comparison on a step is kept."""
    return run / "compare" / f"step-{step:05d}.json"


def stored_tables(run: Path) -> list[Json]:
    """The tables of every comparison that the run folder holds.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    return [table for file in sorted(run.glob("compare/step-*.json")) for table in _read(file)]


def _read(file: Path) -> list[Json]:
    try:
        return tables(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: is no comparison of this version of groupwise ({error!r}); delete it, or make it again with "
            f"`groupwise compare {file.parents[1]}`"
        ) from error


def tables(result: Json) -> list[Json]:
    """The tables of a comparison; what is not known is empty.

    `numbers` says whether all columns but the first hold numbers, and `shade` how strong a colour, from -1 to 1, each
    cell has in the report.
    """
    entries = result["algorithms"]
    names = [entry["name"] for entry in entries]
    found: list[Json] = []
    if names:
        found.append(_table(result, "the update", _UPDATE, list(_update(result)), note=_where(result)))
        found.append(_table(result, "whom it favours", _FAVOURS, list(_favours(result)), note=_ABOUT_FAVOURS))
        found[-1]["shade"] = [[0] * len(_FAVOURS), *(_more(entry, result) for entry in entries)]
    for kind, title in (("weights", "cosines of the gradients"), ("logprobs", "cosines of the pushes")):
        cosines = result["cosine"][kind]
        if names and cosines is not None:
            rows = [[name, *map(_signed, row)] for name, row in zip(names, cosines, strict=True)]
            found.append(_table(result, title, ["", *names], rows))
            found[-1]["shade"] = [[0, *row] for row in cosines]
    if result["left_out"]:
        rows = [[one["name"], one["reason"]] for one in result["left_out"]]
        found.append({**_table(result, "left out", ["algorithm", "because"], rows), "numbers": False})
    return found


def _table(result: Json, title: str, columns: Sequence[str], rows: list[list[str]], note: str = "") -> Json:
    whole = f"Step {result['step']}: {title}"
    return {"title": whole, "note": note, "columns": list(columns), "rows": rows, "numbers": True}


def _more(entry: Json, result: Json) -> list[float]:
    """By how much each class gets more than its share of the tokens."""
    shares = ((entry["shares"][key], result["token_shares"][key]) for key in CLASSES)
    return [0, *(2 * (share - even) if share is not None and even is not None else 0 for share, even in shares), 0]


def _update(result: Json) -> Iterator[list[str]]:
    count = len(result["algorithms"])
    pushes, gradients = (_relative(norms or [None] * count, result) for norms in result["norm"].values())
    for entry, push, gradient in zip(result["algorithms"], pushes, gradients, strict=True):
        advantage = entry["advantage"]
        yield [
            entry["name"],
            _signed(advantage["mean"]),
            "" if advantage["spread"] is None else f"{advantage['spread']:.3g}",
            _percent(advantage["zero"]),
            _signed(advantage["correlation"]),
            push,
            gradient,
            _percent(entry["clipped"], 1),
            _percent(entry["silenced"], 1),
        ]


def _relative(norms: Sequence[float | None], result: Json) -> list[str]:
    """As multiples of the run's, which is the first; as they are where the run's own algorithm was left out."""
    own = norms[0] if result["algorithms"][0]["name"] == "run" else None
    return ["" if norm is None else f"{norm / own:.3g}×" if own else f"{norm:.3g}" for norm in norms]


def _where(result: Json) -> str:
    """What the numbers of the update are, and at which weights they were taken."""
    weights, moved, before = result["weights"], result["moved"], result["step"] - 1
    said = [
        f"{result['completions']} completions of {result['prompts']} prompts, all in one update. {_ABOUT_UPDATE}",
        *result["notes"],
    ]
    if weights is not None:
        own = weights["steps_done"] == before
        kept = "those that sampled this step" if own else f"those that sampled this step, after {before}, were not kept"
        said.insert(1, f"Gradients are at the weights after {weights['steps_done']} steps ({weights['name']}): {kept}.")
    if moved is not None:
        read_again = f"those after this step, known of {moved['completions']} completions"
        at = f"those at the weights after {moved['steps_done']} steps ({moved['name']})"
        said.insert(-len(result["notes"]) or len(said), f"{_ABOUT_CLIPPING} {at if moved['name'] else read_again}.")
    return " ".join(said)


def _favours(result: Json) -> Iterator[list[str]]:
    yield ["all tokens", *(_percent(result["token_shares"][key]) for key in CLASSES), ""]
    for entry in result["algorithms"]:
        yield [entry["name"], *(_percent(entry["shares"][key]) for key in CLASSES), _signed(entry["length_slope"])]


def _signed(value: float | None) -> str:
    return "" if value is None else f"{round(value, 3) + 0.0:+.3f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}%}"
