"""`groupwise explain`: what an algorithm computes, as formulas with its numbers, slot by slot, and on four completions.

Nothing is computed a second time here: the formulas come from the slots, the example runs through
`Algorithm.credit`, `batches` and `loss`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from groupwise.about import ABOUT
from groupwise.advantages import Array, ReturnToGo
from groupwise.algorithms import Algorithm
from groupwise.combinations import cautions
from groupwise.errors import ConfigError
from groupwise.losses import RatioLevel, Reinforce
from groupwise.records import Rollout
from groupwise.slots import Slot, code_path, formula_of, replace

REWARDS, LENGTHS = (1.0, 1.0, 0.0, 0.0), (3, 6, 4, 7)
MAX_TOKENS = 8
"""Stands in for `sampling.max_tokens` where an algorithm, not a run file, is explained."""

RATIOS: dict[RatioLevel, str] = {
    "token": "π / {}, of each token",
    "sequence": "(Π_t π / {})^(1/|o|), of the completion",
    "sequence_token": "sg[(Π_t π / {0})^(1/|o|)] · π / sg[π], of each token",
    "sequence_product": "Π_t π / {}, of the completion",
}
LEGEND = (
    "Sums go over the tokens of an optimizer step: T tokens in M completions of P prompts, |o| tokens in a completion, "
    "n_g in a group. π is the policy, π_old the one before this step's updates, μ the one that sampled; sg[x]: x "
    "without its gradient."
)


# The formula ---------------------------------------------------------------------------------------------------------


def equations(a: Algorithm) -> list[tuple[str, str]]:
    """The objective as (symbol, what it is), from the loss down to its parts; `r ←` changes what stands above."""
    at = "" if a.kl is None else a.kl.placement
    token_kl = a.token_kl_coef
    plain = a.supervision == "outcome" and a.credit_over_time == ReturnToGo() and not token_kl
    z = "A" if plain else "z"
    whiten = {a.whiten.level: formula_of(a.whiten)} if a.whiten is not None else {}
    ratio = RATIOS[a.ratio].format({"old": "π_old", "rollout": "μ"}[a.anchor])
    end = {"outcome": "z at the last token", "process": "z of a reasoning step at its last token"}[a.supervision]
    drift = f" − {token_kl:g} log(π_old / π_ref)" if token_kl else ""
    lines = [
        ("L", _loss(a)),
        ("Φ", formula_of(a.surrogate)),
        ("ρ", "" if isinstance(a.surrogate, Reinforce) else ratio),
        ("r ←", "r − reward of the greedy completion" if a.greedy_baseline else ""),
        ("r ←", f"r + s,  s = {formula_of(a.shaping)}" if a.shaping is not None else ""),
        ("r ←", f"r − {a.sequence_kl_coef:g} Σ_t log(π_old / π_ref)" if at == "reward_sequence" else ""),
        (z, _normalised(a)),
        (f"{z} ←", _clipped(z, a.reward_clip)),
        (f"{z} ←", whiten.get("sample", "").replace("A", z)),
        ("r_t", "" if plain else f"{end}{drift}"),
        ("r_t ←", _clipped("r_t", a.reward_clip) if token_kl else ""),
        ("A_t", "" if plain else formula_of(a.credit_over_time)),
        ("A ←", whiten.get("token", "")),
        ("A ←", _clipped("A", a.advantage_clip)),
        ("w", formula_of(a.aggregate)),
        ("m", _said(a.selection)),
        ("c", _said(a.correction)),
        ("K", _said(a.kl) if at == "loss" else ""),
        ("H", _said(a.entropy)),
        ("critic", _said(a.critic)),
    ]
    return [(symbol, text) for symbol, text in lines if text]


def _loss(a: Algorithm) -> str:
    factors = ["w", *(["m"] if a.selection else []), *(["c"] if a.correction else [])]
    kl = f" + {a.kl.coef:g} Σ w K" if a.kl is not None and a.kl.placement == "loss" else ""
    entropy = f" − {a.entropy.coef:g} Σ w H" if a.entropy is not None else ""
    return f"− Σ {' '.join(factors)} Φ{kl}{entropy}"


def _normalised(a: Algorithm) -> str:
    each, weigh = ("r_k", "Σ_k weight_k ") if a.combine == "normalize_then_sum" else ("r", "")
    centred = each if a.baseline is None else f"{each} − {formula_of(a.baseline)}"
    scaled = centred if a.scale is None else f"{_grouped(centred)} / {_grouped(formula_of(a.scale))}"
    return weigh + (_grouped(scaled) if weigh and a.scale is None else scaled)


def _grouped(text: str) -> str:
    return f"({text})" if " " in text else text


def _clipped(symbol: str, limit: float | None) -> str:
    return "" if limit is None else f"clip({symbol}, −{limit:g}, {limit:g})"


def _said(value: object) -> str:
    return "" if value is None else formula_of(value)


# The slots -----------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What an algorithm has in one slot."""

    slot: str
    value: str
    """Its name and its settings; empty when the slot is off."""
    does: str
    paper: str
    """The arXiv id of the value's docstring."""


def choices(a: Algorithm) -> list[Choice]:
    """Every slot of an algorithm, in the order of its definition."""
    return [_choice(name, getattr(a, name), field.description or "") for name, field in type(a).model_fields.items()]


def _choice(name: str, value: Any, description: str) -> Choice:
    off = value is None or value in (False, 0.0, "none")
    text = description if off or not (callable(value) or isinstance(value, Slot)) else doc_of(value)
    paper = re.search(r"arXiv:(\d{4}\.\d{5})", text)
    return Choice(name, "" if off else spelled(value), first_sentence(text), paper[1] if paper else "")


def spelled(value: Any) -> str:
    """A slot's value for people: `clip (low 0.2, high 0.28, dual none)`."""
    if not isinstance(value, Slot):
        return code_path(value) if callable(value) else "none" if value is None else str(value)
    settings = ", ".join(
        f"{name} {'none' if setting is None else setting}" for name, setting in value if name not in ("type", "acting")
    )
    name = str(getattr(value, "type", type(value).__name__))
    return f"{name} ({settings})" if settings else name


def doc_of(value: object) -> str:
    """The docstring of a slot's class or of a function."""
    documented = value if hasattr(value, "__name__") else type(value)
    return " ".join((documented.__doc__ or "").split())


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    return re.split(r"(?<!\bDr)(?<!\beq)\.(?=\s|$)", " ".join(text.split()), maxsplit=1)[0]


def differences(a: Algorithm, other: Algorithm) -> list[tuple[str, str, str]]:
    """(slot, value here, value there) of each slot in which two algorithms differ."""
    return [
        (name, spelled(getattr(a, name)), spelled(getattr(other, name)))
        for name in type(a).model_fields
        if getattr(a, name) != getattr(other, name)
    ]


def with_std(a: Algorithm, std: Literal["population", "sample"]) -> Algorithm:
    """The algorithm with this standard deviation in its scale.

    Raises:
        ConfigError: it divides by no standard deviation.
    """
    if not isinstance(a.scale, Slot) or "ddof" not in type(a.scale).model_fields:
        raise ConfigError(f"--std: there is none to choose, scale is {spelled(a.scale)}; leave it out")
    return replace(a, scale=replace(a.scale, ddof={"population": 0, "sample": 1}[std]))


# The worked example --------------------------------------------------------------------------------------------------


class Worked(NamedTuple):
    """What became of one completion of the example; arrays have an entry for each of its tokens."""

    reward: float
    """Its shape included."""
    baseline: float | None
    scale: float | None
    advantages: Array
    weights: Array
    """Empty when the completion cannot carry a gradient and is left out."""
    push: Array
    """`-dL/d log pi` of each token, at ratio 1: how hard the update raises its log-probability."""


class Spy:
    """A statistic or shaping that remembers what it answered."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.answer: Array = np.zeros(0)

    def __call__(self, *args: Any) -> Array:
        self.answer = self._inner(*args)
        return self.answer


def worked_example(a: Algorithm) -> list[Worked]:
    """One group of four completions with rewards 1, 1, 0, 0, on-policy, through the algorithm's own code.

    For process supervision each completion has two steps that earn its reward.  The critic, if any, says 0.
    """
    a = a.resolve(MAX_TOKENS)
    spies = {name: Spy(getattr(a, name)) for name in ("shaping", "baseline", "scale") if getattr(a, name) is not None}
    rollouts = replace(a, **spies).credit([_completion(row) for row in range(len(REWARDS))])
    batch = next(a.batches(rollouts, dtype=torch.float64))
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    loss, _ = a.loss(logprobs, torch.ones_like(logprobs), batch)
    (gradient,) = torch.autograd.grad(loss, logprobs) if len(batch) else (logprobs,)
    rows = {int(row): index for index, row in enumerate(batch.tokens[:, 0])}
    # Process supervision asks for a number for each step; the last step of a completion speaks for it here.
    asked = {name: spy.answer.reshape(len(REWARDS), -1)[:, -1] for name, spy in spies.items() if len(spy.answer)}
    worked: list[Worked] = []
    for row, rollout in enumerate(rollouts):
        assert rollout.advantages is not None
        tokens = (rows[row], slice(LENGTHS[row])) if row in rows else None
        worked.append(
            Worked(
                reward=rollout.reward + (float(asked["shaping"][row]) if "shaping" in asked else 0.0),
                baseline=float(asked["baseline"][row]) if "baseline" in asked else None,
                scale=float(asked["scale"][row]) if "scale" in asked else None,
                advantages=rollout.advantages.astype(np.float64),
                weights=np.zeros(0) if tokens is None else batch.weights[tokens].numpy(),
                push=np.zeros(LENGTHS[row]) if tokens is None else -gradient[tokens].numpy(),
            )
        )
    return worked


def _completion(row: int) -> Rollout:
    length, reward = LENGTHS[row], REWARDS[row]
    logprobs = np.full(length, -1.0)
    return Rollout(
        tokens=np.full(length, row, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.bool_),
        logprobs=logprobs,
        group=0,
        rewards={"reward": reward},
        reward=reward,
        step_rewards=((length // 2 - 1, reward), (length - 1, reward)),
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        values=np.zeros(length),
        entropies=np.linspace(2.0, 0.1, length),
    )


# The page ------------------------------------------------------------------------------------------------------------


def explain(name: str, a: Algorithm, other: tuple[str, Algorithm] | None = None) -> Iterator[RenderableType]:
    """The whole explanation of an algorithm; `other` is the (name, algorithm) to compare it with."""
    yield _heading(name)
    yield _formulas(equations(a))
    yield Text(LEGEND, style="dim")
    for applies, text in cautions(a):
        if applies:
            yield Text(f"note: {text}", style="yellow")
    chosen = choices(a)
    table = _table("slot", "value", "what it does", "arXiv", title="Slots")
    for choice in chosen:
        if choice.value:
            table.add_row(*(Text(text.replace("`", "")) for text in choice))
    yield table
    yield Text(f"Off: {', '.join(choice.slot for choice in chosen if not choice.value)}.", style="dim")
    if other is not None:
        yield from _comparison(name, a, *other)
    yield _example(name, a)
    if other is not None:
        yield _example(*other)
    yield Text(
        "Four completions of one prompt, on-policy, the reference still equal to the policy (so no KL acts yet). The "
        "push is -dL/d log π: how hard the update raises the log-probability of a token, and of all tokens together. "
        "Where tokens differ, the first and the last are shown.",
        style="dim",
    )


def _heading(name: str) -> Text:
    about = ABOUT.get(name)
    if about is None:
        return Text(name, style="bold")
    head = ", ".join([about.title, *(f"arXiv:{paper}" for paper in about.paper.split())])
    more = {"Answers": about.fixes, "For": about.when, "Published numbers": about.published}
    lines = [about.idea, *(f"{label}: {text}" for label, text in more.items() if text)]
    return Text.assemble((name, "bold"), f": {head}\n", "\n".join(lines))


def _formulas(lines: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for symbol, text in lines:
        head, arrow, _ = symbol.partition(" ←")
        table.add_row(Text(head, style="bold"), "←" if arrow else "=", Text(text))
    return table


def _comparison(name: str, a: Algorithm, other_name: str, other: Algorithm) -> Iterator[RenderableType]:
    table = _table("", name, other_name, title=f"{name} against {other_name}")
    for row in differences(a, other):
        table.add_row(*map(Text, row))
    here, there = equations(a), equations(other)
    for symbol in dict.fromkeys(symbol for symbol, _ in [*here, *there]):
        texts = ["\n".join(text for s, text in lines if s == symbol) or "none" for lines in (here, there)]
        if texts[0] != texts[1]:
            table.add_row(*map(Text, (symbol, *texts)))
    yield table if table.row_count else Text(f"{name} and {other_name} are the same algorithm.")


def _example(name: str, a: Algorithm) -> Table:
    table = _table(
        "completion", "tokens", "reward", "baseline", "scale", "advantage", "w", "push a token", "push of all",
        title=f"{name}, worked",
    )  # fmt: skip
    for row, worked in enumerate(worked_example(a)):
        table.add_row(
            "ABCD"[row],
            str(LENGTHS[row]),
            f"{worked.reward:g}",
            *("none" if value is None else f"{value:.4f}" for value in (worked.baseline, worked.scale)),
            _span(worked.advantages),
            _span(worked.weights, sign="") if len(worked.weights) else "left out",
            _span(worked.push),
            f"{worked.push.sum():+.4f}",
        )
    return table


def _span(values: Array, sign: str = "+") -> str:
    first, last = (f"{value + 0.0:{sign}.4f}" for value in (values[0], values[-1]))
    return first if np.allclose(values, values[0], rtol=1e-9) else f"{first} … {last}"


def _table(*columns: str, title: str) -> Table:
    table = Table(
        box=None, title=title, title_justify="left", title_style="bold", header_style="bold", padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
