"""Writes the generated pages: docs/algorithms.md, docs/configuration.md, docs/metrics.md, and README.md's table.

Whatever they say comes from the code; `tests/test_docs.py` fails when a committed page differs from what this makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from groupwise.about import ABOUT
from groupwise.algorithms import Algorithm
from groupwise.config import Config
from groupwise.explain import LEGEND, equations
from groupwise.losses import LossInputs, Reinforce
from groupwise.penalties import (
    KL,
)
from groupwise.presets import PRESETS
from groupwise.schema import reference
from groupwise.slots import Slot

ROOT = Path(__file__).parents[1]
IN_README = (
    "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "rloo", "reinforce_pp", "lite_ppo", "gdpo", "degrpo",
    "ppo",
)  # fmt: skip


def pages() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    return {
        ROOT / "docs" / "algorithms.md": algorithms_page(),
        ROOT / "docs" / "configuration.md": configuration_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        ROOT / "README.md": readme((ROOT / "README.md").read_text(encoding="utf-8")),
    }


def _made_by(source: str) -> str:
    return f"<!-- Made by `make docs` from {source}; do not edit. -->\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(*columns: str) -> list[str]:
    return [_row(*columns), "|" + " --- |" * len(columns)]


# Algorithms ----------------------------------------------------------------------------------------------------------

ALGORITHMS = f"""# Algorithms

{_made_by("src/groupwise/presets.py and about.py")}
Every algorithm here is one value: a choice in each slot of

    L = − Σ w m c Φ(ρ, A)  +  β Σ w K  −  η Σ w H

`A` advantage, `ρ` probability ratio, `Φ` surrogate, `w` how much a token counts, `m` token selection, `c` off-policy
correction, `K` distance to another policy, `H` entropy. [design.md](design.md) walks through it;
[configuration.md](configuration.md) has every slot's members and settings.

To use one, by its name:

```yaml
algorithm: gspo
```

```python
import groupwise as gw

config = gw.Config(
    model="my-model", data=gw.Data(path="prompts.jsonl"), rewards=("math_answer",), algorithm=gw.PRESETS["gspo"]
)
```

or on the command line: `groupwise train run.yaml --algorithm gspo`. To change a slot of one:

```yaml
algorithm:
  preset: gspo
  surrogate: {{high: 1e-3}}
  kl: {{coef: 0.001, estimator: k3_is}}
```

```python
import groupwise as gw

MINE = gw.replace(gw.DAPO, surrogate=gw.Cispo(cap=5.0))
```

`groupwise explain NAME` shows an algorithm with its numbers, its slots and a worked example; with `--against OTHER`,
how it differs from another one.

{LEGEND}

"Published numbers" are those of the paper or of the code named in the title, not results of ours. Where they name a
group size, a length or a learning rate, those are settings of the run and not part of the preset.
"""


def algorithms_page() -> str:
    lines = [
        ALGORITHMS,
        "## All of them\n",
        *_table("name", "what it changes", "paper", "slots that differ from the default"),
    ]
    for name, about in ABOUT.items():
        slots = ", ".join(f"`{slot}`" for slot in slots_of(PRESETS[name])) or "none"
        lines.append(_row(f"[`{name}`](#{name})", about.idea, _papers(about.paper), slots))
    lines.append("")
    for name in ABOUT:
        lines += _algorithm(name)
    return "\n".join([*lines, *kl_section()])


def _algorithm(name: str) -> Iterator[str]:
    about = ABOUT[name]
    yield f"## {name}\n"
    yield f"**{about.title}** {_papers(about.paper)}\n".replace(" \n", "\n")
    yield f"{about.idea[0].upper()}{about.idea[1:]}.\n"
    for label, text in (("Answers", about.fixes), ("For", about.when), ("Published numbers", about.published)):
        if text:
            yield f"* **{label}:** {text}"
    formula = equations(PRESETS[name])
    width = max(len(symbol.removesuffix(" ←")) for symbol, _ in formula)
    yield "\n```text"
    for symbol, text in formula:
        yield f"{symbol.removesuffix(' ←'):{width}} {'←' if symbol.endswith('←') else '='} {text}"
    yield "```\n"
    changed = slots_of(PRESETS[name])
    yield f"```yaml\n# algorithm: {name}, slot by slot"
    yield yaml.safe_dump({"algorithm": changed}, sort_keys=False, default_flow_style=None, width=100).rstrip()
    yield "```\n"


def _papers(ids: str) -> str:
    return ", ".join(f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in ids.split())


def slots_of(a: Algorithm) -> dict[str, Any]:
    """What a run file has to say to get this algorithm without naming it."""
    default = Algorithm()
    return {
        name: _settings(getattr(a, name), getattr(default, name))
        for name in type(a).model_fields
        if getattr(a, name) != getattr(default, name)
    }


def _settings(value: Any, default: Any) -> Any:
    """The settings of a slot's value that differ from what is there when it is named by its type alone."""
    if not isinstance(value, Slot):
        return value
    usual = default if type(default) is type(value) else type(value)()
    dumped = value.model_dump(mode="json")
    said = {"type", *value.model_fields_set}
    return {key: dumped[key] for key in dumped if key in said or getattr(value, key) != getattr(usual, key)}


# KL ------------------------------------------------------------------------------------------------------------------

POLICY, REFERENCE = (0.5, -0.2, 0.1), (0.0, 0.3, -0.4)
VERDICTS = {
    "k1_in_loss": ("`k1`", "`loss`", "zero: no regularisation, only noise; **refused**"),
    "k2_in_loss": ("`k2`", "`loss`", "that of the reverse KL, on-policy"),
    "k3_in_loss": (
        "`k3`",
        "`loss`",
        "that of the *forward* KL: a fine regulariser (GRPO as published), not the reverse KL",
    ),
    "k3_in_loss_is_corrected": ("`k3_is`", "`loss`", "that of the reverse KL, off-policy as well; take this one"),
    "k1_in_reward": ("`k1`", "`reward_token`, `reward_sequence`", "that of the reverse KL"),
    "k2_in_reward": ("`k2`", "reward", "the wrong sign; **refused**"),
    "k3_in_reward": ("`k3`", "reward", "the wrong sign; **refused**"),
}
KL_TEXT = """## Which KL gives which gradient

An estimator with the right value need not have the right gradient. Below, the policy is a categorical distribution
over three tokens with logits (0.5, -0.2, 0.1), and the reference has (0.0, 0.3, -0.4). The gradients with respect to
the logits are exact expectations over the three tokens, by automatic differentiation of the code that trains.

With d = log π - log π_ref of the sampled token: k1 = d, k2 = d² / 2, k3 = e^-d - 1 + d, and k3_is = (π / π_old) k3
with the ratio differentiated. "In the reward": the estimate is subtracted from the reward, and REINFORCE does the rest.
"""
KL_END = """
The metric `kl` is the value of the estimate. On average it is the same for k1 and k3, so a regulariser that does
nothing cannot be told from the log of its run. The three combinations are refused when the settings are read.
"""


def kl_gradients() -> dict[str, list[float]]:
    """The expected gradient of each estimate in each placement, and of the two true KLs, for the page's example."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    log_q = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(-1)
    p, d = log_p.exp(), log_p - log_q
    expected = {"reverse_kl": (p * d).sum(), "forward_kl": -(log_q.exp() * d).sum()}
    names = {"k1": "k1", "k2": "k2", "k3": "k3", "k3_is": "k3"}
    for estimator, key in names.items():
        x = _one_token_each(log_p, log_q)
        estimate = KL(estimator=estimator)(x)[:, 0]  # pyright: ignore[reportArgumentType]
        is_corrected = "_is_corrected" if estimator == "k3_is" else ""
        expected[f"{key}_in_loss{is_corrected}"] = (p.detach() * estimate).sum()
        if not is_corrected:
            reinforce, _ = Reinforce()(x._replace(advantages=-estimate.detach()[:, None]))
            expected[f"{key}_in_reward"] = (p.detach() * reinforce[:, 0]).sum()
    return {name: torch.autograd.grad(value, logits, retain_graph=True)[0].tolist() for name, value in expected.items()}


def _one_token_each(log_p: torch.Tensor, log_q: torch.Tensor) -> LossInputs:
    new, old = log_p[:, None], log_p.detach()[:, None]
    ones = torch.ones_like(old)
    return LossInputs(
        logprobs=new,
        old=old,
        rollout=old,
        ref=log_q[:, None],
        advantages=ones,
        entropy=ones,
        mask=ones,
        log_ratio=new - old,
    )


def kl_section() -> Iterator[str]:
    gradients = kl_gradients()
    yield KL_TEXT
    yield from _table("estimator", "placement", "expected gradient", "which is")
    yield _row("true reverse KL(π, π_ref)", "", _vector(gradients["reverse_kl"]), "")
    yield _row("true forward KL(π_ref, π)", "", _vector(gradients["forward_kl"]), "")
    for key, (estimator, placement, verdict) in VERDICTS.items():
        yield _row(estimator, placement, _vector(gradients[key]), verdict)
    yield KL_END


def _vector(values: list[float]) -> str:
    return "(" + ", ".join("0" if abs(value) < 5e-7 else f"{value:+.6f}" for value in values) + ")"


# Settings ------------------------------------------------------------------------------------------------------------

CONFIGURATION = f"""# Settings

{_made_by("`groupwise config --reference`")}
A run file is YAML with these settings; only `model`, `data.path` (or `data.mixture`) and `rewards` are
required.
`groupwise train RUN.yaml key=value` sets single ones on top, with dots between the names. `groupwise config RUN.yaml`
prints the whole tree as a run would use it. A setting that does not exist, or has the wrong type, is an error.

Where a setting chooses from a family (`algorithm.surrogate`, a reward, ...), a member is spelled by its name
(`surrogate: cispo`) or with settings (`surrogate: {{type: cispo, cap: 4.0}}`), and code takes its place as
`file.py:function`.
"""


def configuration_page() -> str:
    groups: dict[str, list[tuple[str, str, str]]] = {"": []}
    for path, default, text in reference(Config):
        head, dot, rest = path.partition(".")
        group = f"{head}.{rest.partition('.')[0].partition('[')[0]}" if head == "algorithm" and dot else head
        groups.setdefault(group, []).append((path, default, text))
    lines = [CONFIGURATION]
    single = [rows[0] for group, rows in groups.items() if len(rows) == 1 and not group.startswith("algorithm")]
    slots = [rows[0] for group, rows in groups.items() if len(rows) == 1 and group.startswith("algorithm.")]
    lines += ["## The run\n", *_settings_table(single)]
    for group, rows in groups.items():
        if len(rows) > 1 and not group.startswith("algorithm."):
            lines += [f"## {group}\n", *_introduced(rows)]
    algorithm = groups["algorithm"][0]
    lines += ["## algorithm\n", f"{algorithm[2]} See [algorithms.md](algorithms.md).\n", *_settings_table(slots)]
    for group, rows in groups.items():
        if len(rows) > 1 and group.startswith("algorithm."):
            lines += [f"### {group}\n", *_introduced(rows)]
    return "\n".join(lines)


def _introduced(rows: list[tuple[str, str, str]]) -> list[str]:
    _, default, text = rows[0]
    usual = f" Default: `{default}`." if default not in ("", "required") else ""
    return [f"{text}{usual}\n", *_settings_table(rows[1:])]


def _settings_table(rows: list[tuple[str, str, str]]) -> list[str]:
    cells = [_row(f"`{path}`", f"`{default}`" if default else "", text) for path, default, text in rows]
    return [*_table("setting", "default", "what it does"), *cells, ""]


# Metrics -------------------------------------------------------------------------------------------------------------

METRICS = {
    "The step": {
        "step": "Steps done; 0 is the evaluation before training.",
        "age": "Training steps that the policy had taken since the oldest weights that sampled these completions.",
        "age/mean": "The same, averaged over the completions.",
        "queue": "With `ahead`: steps that were sampled and scored already when the learner asked for the next one.",
        "idle/<side>": "With `engine.sampler: vllm` or `engine.placement: ray`: share of the time in which `sampler` "
        "or `learner` had nothing to do.",
        "seconds": "Wall time of the step; writing and checkpoints count in the record after them.",
        "seconds/<phase>": "Its parts: `sample`, `credit` (old, reference and critic passes, advantages), `update`, "
        "`checkpoint`, and `log` (writing the files of the step before).",
        "tokens_per_second": "Sampled tokens over the wall time of the whole step.",
        "memory/<device>": "The most memory held so far, in GiB: `host`, by the process; `gpu`, allocated on the GPU.",
    },
    "Rewards and completions": {
        "reward": "Mean reward: the weighted sum of the reward functions, before any shaping by length.",
        "reward/<name>": "Mean of one reward function, where it had an opinion, before its weight.",
        "reward_std": "Standard deviation of the reward within a group (sample std), averaged over the groups.",
        "frac_reward_zero_std": "Share of completions in groups whose rewards are all equal: they teach nothing.",
        "completion_length": "Mean length in tokens, the stop token included.",
        "completion_tokens": "Sampled tokens of the step.",
        "truncated": "Share of completions that hit the length limit.",
        "invalid": "Share of completions without a trustworthy reward; they are left out of statistics and loss.",
        "invalid/<name>": "Share of completions on which one reward function has no verdict, because it failed.",
        "invalid/<name>/<cause>": "Its parts, where there are any: the function `raised`, had no answer in time "
        "(`timeout`), took its worker down (`crashed`), or `returned` what is no finite number.",
        "entropy": "Mean entropy, in nats, of the distributions that the tokens were drawn from; null with "
        "`engine.sampler: vllm`, which does not say.",
    },
    "The update": {
        "loss": "The objective's value. On-policy it says little: its gradient does the work.",
        "grad_norm": "L2 norm of the gradient before it is clipped to `optimizer.max_grad_norm`.",
        "learning_rate": "Of this update.",
        "skipped_updates": "Updates left out because loss or gradient was not finite; only where there were some.",
        "clip_ratio/low": "Share of tokens with A < 0 whose ratio lies below the surrogate's lower bound.",
        "clip_ratio/high": "Share of tokens with A > 0 whose ratio lies above the surrogate's upper bound.",
        "approx_kl": "k3 estimate of how far the update has moved from the policy at the start of the step; 0 with one "
        "update a step.",
        "sampler_mismatch": "Mean |log-prob difference| between sampler and learner at the same weights, in nats. "
        "What older weights sampled counts as 0, or, with a correction, as far as the policy has moved since.",
        "kl": "The estimate of `algorithm.kl`, without its coefficient; only with a KL in the loss.",
        "correction": "Mean weight of `algorithm.correction`; only with one.",
        "critic/loss": "The critic's loss; only with a critic (PPO).",
        "critic/grad_norm": "The same as `grad_norm`, of the critic.",
        "critic/learning_rate": "The same as `learning_rate`, of the critic.",
    },
    "Evaluations": {
        "eval/<name>": "Mean of one reward function on the held-out prompts, where it had an opinion.",
        "eval/pass@<k>": "The chance that one of k samples is right (more than 0.5 of the first reward): "
        "`1 - C(n - c, k) / C(n, k)`, for k = 1, 2, 4, ...; only with `evaluation.samples` above 1, as the next.",
        "eval/maj@<k>": "The chance that the answer that most of k samples give is right; only where the first reward "
        "has an answer to vote on.",
        "eval/completion_length": "Mean length in tokens of the held-out completions.",
    },
}
METRICS_TEXT = f"""# Metrics

{_made_by("tools/docs.py")}
A run appends one JSON object a line to `metrics.jsonl` in its folder: one for each step, and one for each evaluation,
which has only `step` and the `eval/` keys. What a step's updates report is averaged over the updates, and what tokens
report over the loss tokens. A number that does not exist (a mean of nothing) is `null`.

Every completion is in `rollouts/step-NNNNN.parquet`, and every held-out one in `evaluations/step-NNNNN.parquet`: its
prompt, text, length, rewards (`fault/<name>` is the cause where one has no verdict) and those of its steps where a
reward gives them, advantage, why it ended, and lists with an entry for each token, the prompt's included: `tokens`,
`pieces` (the text of each token), `loss_mask`, `logprobs`, `entropies`, `advantages`, and where the algorithm has them
`old_logprobs` and `ref_logprobs`. `new_logprobs`, after the step's updates, is there for one group of a step: the one
whose rewards differ most.
"""


def metrics_page() -> str:
    lines = [METRICS_TEXT]
    for group, rows in METRICS.items():
        lines += [f"## {group}\n", *_table("metric", "what it is")]
        lines += [*(_row(f"`{name}`", text) for name, text in rows.items()), ""]
    return "\n".join(lines)


# README --------------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- algorithms, by make docs -->", "<!-- end -->"


def readme(text: str) -> str:
    """README.md with its table of algorithms made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    rows = [
        _row(f"[`{name}`](docs/algorithms.md#{name})", _papers(ABOUT[name].paper), ABOUT[name].idea)
        for name in IN_README
    ]
    table = "\n".join([*_table("name", "paper", "what it changes"), *rows])
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else text


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
