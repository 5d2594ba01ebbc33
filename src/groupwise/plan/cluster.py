"""The same run on GPUs: a learner sharded by FSDP and samplers of vLLM, in closed form.

The update's work is the rehearsed one, in bfloat16; what the cluster adds is in the formulas here.  Shapes: N prompts
of P tokens a step, G completions each.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from groupwise.config import Config
from groupwise.model import vocabulary
from groupwise.plan.kernels import Work
from groupwise.plan.local import optimizer
from groupwise.plan.machine import Cluster
from groupwise.plan.rehearsal import Stage
from groupwise.plan.sampling import Lengths
from groupwise.resources import FEWEST_TOKENS, key_value_count, parameter_count

USABLE = 0.9
"""Share of a GPU's memory that a plan fills; vLLM's own default, too."""
SAMPLER_RESERVE = 2e9
"""What vLLM keeps beside weights and cache: activations, CUDA graphs, the communicator."""
STEP_SECONDS = 2e-3
"""Of a decoding step of vLLM that computes nothing: scheduling, sampling, graph launch."""
HOP_SECONDS = 2e-5
"""Latency of one hop of a collective operation."""
WAKE_SECONDS, WAKE_BANDWIDTH = 1.0, 20e9
"""Putting a sampler to sleep and waking it where it shares its GPU with the learner: at least, and bytes/s by PCIe."""
MOST_MICROBATCH = 16384
REHEARSED_TOKENS = 4096


@dataclass(frozen=True)
class Job:
    """A run as a cluster sees it."""

    config: Config
    cluster: Cluster
    lengths: Lengths
    parameters: int
    trained: int
    layers: int
    largest: int
    """Weights of embedding and head, which are gathered as one each."""
    cached: int
    """Bytes of keys and values of a token, in bfloat16."""
    token_bytes: float
    """Activations of a token of a micro-batch."""
    head_bytes: float
    """Logits of a chunk and their gradient."""
    update: Work
    """The passes over all rows of a step: update, scoring, critic."""
    step: Work
    """The optimizers'."""
    passes: int
    """How often a step runs through the weights of a model, forward or backward."""
    reference: bool
    critic: bool

    @property
    def rows(self) -> int:
        return self.config.prompts_per_step * self.config.group_size

    @property
    def tokens(self) -> int:
        """Of a step, prompts counted once a group."""
        return self.config.prompts_per_step * self.lengths.prompt + self.rows * self.lengths.completion

    # Memory ----------------------------------------------------------------------------------------------------------

    def learner_fixed(self, learners: int) -> dict[str, float]:
        """Bytes on each learner GPU that do not depend on the micro-batch; masters in float32, all but adapters' base.

        Whoever doubles the GPUs halves what is sharded.
        """
        return {
            "parameters": 4 * self.parameters / learners,
            "gradients": 4 * self.trained / learners,
            "optimizer": 8 * self.trained / learners,
            "reference": 4 * self.parameters * self.reference / learners,
            "critic": 16 * self.parameters * self.critic / learners,
            # Two layers' weights and one's gradient at a time in bfloat16, and embedding and head.
            "gathered": 2 * (3 * (self.parameters - self.largest) / self.layers + 2 * self.largest) * (learners > 1)
            + 2 * self.parameters * (learners == 1),
        }

    def microbatch(self, learners: int) -> int:
        """The most tokens of a micro-batch that fit, at most `MOST_MICROBATCH`; 0 where none do."""
        free = USABLE * self.cluster.gpu.memory - sum(self.learner_fixed(learners).values()) - self.head_bytes
        tokens = min(int(free / self.token_bytes), MOST_MICROBATCH)
        return 2 ** int(math.log2(tokens)) if tokens >= FEWEST_TOKENS else 0

    def learner_bytes(self, learners: int) -> dict[str, float]:
        """Bytes on each learner GPU at their highest, with the micro-batch that fits, or the least that is sensible."""
        tokens = self.microbatch(learners) or FEWEST_TOKENS
        activations = tokens * self.token_bytes + self.head_bytes
        return {**self.learner_fixed(learners), "activations": activations}

    @property
    def parallel(self) -> int:
        """GPUs that a sampler's weights are spread over (tensor parallel); as few as leave room for a cache."""
        spread = 1
        while 2 * self.parameters / spread > 0.6 * USABLE * self.cluster.gpu.memory:
            spread *= 2
        return spread

    def sampler_bytes(self) -> dict[str, float]:
        """Bytes on each sampler GPU: vLLM takes all that it may for its cache."""
        weights = 2 * self.parameters / self.parallel
        cache = max(USABLE * self.cluster.gpu.memory - weights - SAMPLER_RESERVE, 0.0)
        return {"parameters": weights, "KV cache": cache, "reserve": SAMPLER_RESERVE}

    @property
    def slots(self) -> int:
        """Completions that a sampler writes at a time, each with its share of the prompt."""
        each = self.cached / self.parallel * (self.lengths.prompt / self.config.group_size + self.lengths.completion)
        return int(self.sampler_bytes()["KV cache"] / each)

    # Time ------------------------------------------------------------------------------------------------------------

    def decoding(self) -> tuple[float, float]:
        """(seconds of a decoding step, seconds more for each row) of one sampler: weights and keys are read anew."""
        gpu, spread = self.cluster.gpu, self.parallel
        read = gpu.bandwidth * gpu.stream_share
        hops = 2 * self.layers * HOP_SECONDS * math.log2(spread) if spread > 1 else 0.0
        step = 2 * self.parameters / spread / read + STEP_SECONDS + hops
        seen = self.lengths.prompt + self.lengths.completion / 2
        row = self.cached * seen / spread / read
        return step, row + 2 * self.parameters / spread / (gpu.flops * gpu.product_share)

    def prefill_seconds(self, samplers: int) -> float:
        """Every prompt once, spread evenly."""
        gpu = self.cluster.gpu
        tokens = self.config.prompts_per_step * self.lengths.prompt
        return 2 * self.parameters * tokens / (gpu.flops * gpu.product_share) / samplers

    def train_seconds(self, learners: int, tokens: float | None = None) -> float:
        """All passes and updates over the tokens of a step (default: the expected ones)."""
        gpu, scale = self.cluster.gpu, (tokens or self.tokens) / self.tokens
        # Whole rows are dealt out, so that some GPUs may have one more.
        uneven = math.ceil(self.rows / learners) * learners / self.rows
        compute = gpu.duration(self.update) * scale / learners * uneven
        if learners == 1:
            return compute + gpu.duration(self.step)
        budget = self.microbatch(learners) or FEWEST_TOKENS
        parts = max(math.ceil(scale * self.tokens / learners / budget), self.config.updates_per_step)
        moved = 2 * self.parameters * self.passes + 4 * self.trained * (1 + self.critic)
        rounds = parts * self.passes * self.layers * HOP_SECONDS * math.log2(learners)
        link = parts * moved * (learners - 1) / learners / self.cluster.bandwidth(learners)
        return max(compute, link) + rounds + gpu.duration(self.step) / learners

    def publish_seconds(self, samplers: int, members: int) -> float:
        """The weights in bfloat16 (of an adapter its own) to all samplers, as a pipelined broadcast."""
        size = 2 * (self.trained if self.config.lora is not None else self.parameters)
        return size / self.cluster.bandwidth(members) + HOP_SECONDS * self.layers * math.log2(samplers + 1)

    @property
    def turn_seconds(self) -> float:
        """From sampling to training and back on the same GPUs."""
        return WAKE_SECONDS + 2 * self.parameters / self.parallel / WAKE_BANDWIDTH

    def fits(self, learners: int) -> bool:
        return self.microbatch(learners) > 0 and self.slots > 0

    @property
    def fewest(self) -> int:
        """The smallest power of two of learner GPUs on which it fits; 0 when none up to 4,096 does."""
        return next((count for power in range(13) if self.fits(count := 2**power)), 0)


def job_of(config: Config, model: PreTrainedModel, lengths: Lengths, cluster: Cluster) -> Job:
    """Rehearse an update in bfloat16, and see what else the run needs."""
    needs, kind = config.algorithm.needs(config.updates_per_step), torch.bfloat16
    critic, reference = config.algorithm.critic is not None, "ref_logprobs" in needs
    stage = Stage(copy.deepcopy(model), kind, lora=config.lora, checkpointing=config.engine.gradient_checkpointing)
    each = lengths.prompt + lengths.completion * config.group_size
    groups = max(1, min(config.prompts_per_step, REHEARSED_TOKENS // each))
    members = max(1, min(config.group_size, (REHEARSED_TOKENS - lengths.prompt) // lengths.completion))
    members = config.group_size if groups > 1 else members
    scorings = len({"old_logprobs", "ref_logprobs"} & needs)
    rehearsed = stage.update(groups, lengths.prompt, members, lengths.completion, scoring=scorings > 0)
    count = config.prompts_per_step * config.group_size / (groups * members)
    work = rehearsed.update.times(count) + rehearsed.forward.times(count * scorings)
    step = optimizer(rehearsed.trained, torch.float32).times(config.updates_per_step)
    if critic:
        critic_stage = Stage(copy.deepcopy(model), kind)
        judge = critic_stage.update(groups, lengths.prompt, members, lengths.completion, head=False, scoring=True)
        work += judge.update.times(count) + judge.forward.times(count)
        step += optimizer(judge.trained, torch.float32).times(config.updates_per_step)
    tokens, text = groups * (lengths.prompt + members * lengths.completion), model.config.get_text_config()
    return Job(
        config=config,
        cluster=cluster,
        lengths=lengths,
        parameters=parameter_count(model),
        trained=rehearsed.trained,
        layers=text.num_hidden_layers,
        largest=vocabulary(model) * text.hidden_size,
        cached=2 * key_value_count(model),
        token_bytes=rehearsed.kept / tokens,
        head_bytes=rehearsed.head,
        update=work,
        step=step,
        passes=2 + scorings + 3 * critic,
        reference=reference and config.lora is None,
        critic=critic,
    )
