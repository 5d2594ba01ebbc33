"""Simulated scaling of runs on 8 to 4,096 H100: nothing here was measured on a cluster.

The models are those of Qwen3's published configurations, built on the meta device.  Lengths are drawn with the mean and
the tail given below; everything else is what `groupwise plan --gpus 8xH100 --simulate` assumes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tools.plot import Series, chart
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import SMOKE, machine, publish, save_picture, table
from groupwise.config import Config
from groupwise.plan.cluster import Job, job_of
from groupwise.plan.machine import read_gpus
from groupwise.plan.sampling import Lengths
from groupwise.plan.simulate import SIZES, pays_until, scaling


@dataclass(frozen=True)
class Case:
    """A model and the size of a step."""

    model: str
    prompts: int
    group: int = 16
    completion: int = 4000
    longest: int = 16000

    def __str__(self) -> str:
        return f"{self.model}, {self.prompts} x {self.group}"


MODELS = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
CASES = [Case("8B", 128), Case("8B", 512), Case("8B", 2048), Case("1.7B", 512), Case("32B", 512)]


def simulated(case: Case) -> Job:
    """The run on H100."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(
            Qwen3Config(**MODELS[case.model], vocab_size=151936, num_key_value_heads=8, head_dim=128,
                        tie_word_embeddings=case.model == "1.7B", max_position_embeddings=40960)
        )  # fmt: skip
    tree = {
        "model": case.model,
        "data": {"path": "prompts.jsonl"},
        "rewards": ["math_answer"],
        "prompts_per_step": case.prompts,
        "group_size": case.group,
        "sampling": {"max_tokens": case.longest},
        "engine": {"gradient_checkpointing": True},
    }
    lengths = Lengths(300, 300, case.completion, case.longest)
    return job_of(Config.parse(tree).resolve(), model, lengths, read_gpus("8xH100-80G"))


def main() -> None:
    """All cases, the picture and the section of the page."""
    curves, rows, data = [Series("in proportion", [0, 9], at=[0, 9])], list[list[str]](), list[Any]()
    for case in CASES[:1] if SMOKE else CASES:
        scales = scaling(simulated(case), SIZES[:3] if SMOKE else SIZES)
        first = scales[0]
        at = [math.log2(scale.gpus / 8) for scale in scales]
        curves.append(Series(str(case), [at[0] + math.log2(first.step / s.step) for s in scales], at=at))
        last = pays_until(scales)
        best = next(scale for scale in scales if scale.gpus == last)
        split = "in turns" if best.shared else f"{best.samplers} + {best.learners}"
        rows.append([str(case), str(first.gpus), f"{first.step:.0f} s", str(last), split, f"{best.step:.0f} s",
                     f"{best.straggling:.2f}", f"{scales[-1].step:.0f} s", f"{scales[-1].failing:.1%}"])  # fmt: skip
        data.append({"case": asdict(case), "scales": [asdict(scale) for scale in scales], "pays_until": last})
    picture = chart("times as fast, in doublings", curves, "doublings of 8 H100")
    head = ["model, prompts x completions", "fits on", "step there", "pays up to", "sample + train", "step there",
            "last sampler / mean", "step on 4,096", "lost to failures"]  # fmt: skip
    text = (
        "**Simulated**, not measured: completions of 4,000 tokens in the mean (lognormal, spread 0.8, cut at 16,000), "
        "prompts of 300, one update a step, GRPO without KL, activations recomputed, training one step behind the "
        "sampling where that is faster. `docs/scaling.md` has the assumptions.\n\n"
        f"{save_picture('scaling', picture)}\n\n{table(head, rows)}"
    )
    publish("scaling", "Scaling, simulated", text, data, machine())


if __name__ == "__main__":
    main()
