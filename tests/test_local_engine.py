from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, STOP, VOCABULARY, WINDOW, tiny_folder, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from groupwise.drawing import draw
from groupwise.engines import Completion, Learner, LossFn, Optimizer, Request, Sampler, Sampling
from groupwise.engines.local import local_engine
from groupwise.engines.local_learner import LocalLearner
from groupwise.engines.local_sampler import LocalSampler
from groupwise.engines.steps import schedule
from groupwise.errors import CheckpointError, GroupwiseError, ModelError, NumericalError
from groupwise.packing import padded_parts
from groupwise.records import Batch, Rollout, collate
from groupwise.seeding import key

PROMPTS = (3, 9, 1, 14, 9)
"""Lengths on both sides of the sliding window."""
GROUP = 4
TEMPERATURE = 0.7
EVERYTHING = 10**6


def requests(prompts: Sequence[int] = PROMPTS, group_size: int = GROUP) -> list[Request]:
    generator = np.random.default_rng(0)
    return [
        Request(generator.integers(2, VOCABULARY, length, dtype=np.int32), tuple(key(g, i) for i in range(group_size)))
        for g, length in enumerate(prompts)
    ]


def sampler_of(
    model: PreTrainedModel, stop: Sequence[int] = (STOP,), max_batch_tokens: int = EVERYTHING
) -> LocalSampler:
    return LocalSampler(model, stop, max_batch_tokens=max_batch_tokens)


def learner_of(model: PreTrainedModel, optimizer: Optimizer | None = None, **changes: Any) -> LocalLearner:
    settings = {"temperature": TEMPERATURE, "microbatch_tokens": EVERYTHING, "total_updates": 10}
    settings |= {"entropy": True, **changes}
    return LocalLearner(model, optimizer or Optimizer(learning_rate=1e-2), **settings)


def rollouts(asked: Sequence[Request], answers: Sequence[Sequence[Completion]]) -> list[Rollout]:
    def whole(request: Request, values: Any, before: Any) -> Any:
        return np.concatenate([np.full(len(request.prompt), before, dtype=values.dtype), values])

    return [
        Rollout(
            tokens=np.concatenate([request.prompt, answer.tokens]),
            loss_mask=whole(request, np.ones(len(answer.tokens), dtype=np.bool_), False),
            logprobs=whole(request, answer.logprobs, 0.0),
            entropies=whole(request, answer.entropies, 0.0),
            group=group,
            finish_reason=answer.finish_reason,
        )
        for group, (request, group_answers) in enumerate(zip(asked, answers, strict=True))
        for answer in group_answers
    ]


def some_batch(model: PreTrainedModel, dtype: torch.dtype = torch.float64, stop: Sequence[int] = (STOP,)) -> Batch:
    """Sampled rollouts with weights and advantages that differ from token to token."""
    asked = requests()
    batch = collate(
        rollouts(asked, sampler_of(model, stop).sample(asked, Sampling(max_tokens=12, temperature=TEMPERATURE))), dtype
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *batch.tokens.shape, generator=generator, dtype=dtype) * batch.loss_mask
    return Batch(
        **{name: getattr(batch, name) for name in ("tokens", "lengths", "groups", "loss_mask", "rollout_logprobs")},
        advantages=noise[0],
        weights=noise[1].abs() / len(batch),
        selection=batch.selection,
    )


def policy_gradient(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    value = -(batch.weights * batch.advantages * (logprobs - batch.rollout_logprobs).exp()).sum()
    count = batch.loss_mask.sum()
    bonus = (batch.weights * entropies).sum()
    return value - 0.1 * bonus, {
        "entropy": torch.stack([(entropies * batch.loss_mask).sum(), count]),
        "never": torch.zeros(2),
    }


def nothing(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs * 0).sum(), {}


def infinite(logprobs: Tensor, entropies: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum() * torch.inf, {}


def same(left: list[list[Completion]], right: list[list[Completion]]) -> bool:
    pairs = zip(chain(*left), chain(*right), strict=True)
    return all(np.array_equal(a.tokens, b.tokens) and a.finish_reason == b.finish_reason for a, b in pairs)


def count_tokens_forwarded(model: PreTrainedModel) -> list[int]:
    """A list that grows with each forward pass of the decoder, by the number of its tokens."""
    counts: list[int] = []
    decoder: Any = model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return counts


class TestSampler:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_log_probs_and_entropies_are_those_of_the_learner(self, architecture: str) -> None:
        model = tiny_model(architecture)
        asked = requests()
        answers = sampler_of(model).sample(asked, Sampling(max_tokens=20, temperature=TEMPERATURE))
        sampled = rollouts(asked, answers)
        assert max(len(rollout.tokens) for rollout in sampled) > 3 * WINDOW
        batch = collate(sampled)
        learned = learner_of(model, microbatch_tokens=150).logprobs(batch)
        torch.testing.assert_close(learned, batch.rollout_logprobs, atol=1e-5, rtol=1e-5)

        entropies = torch.zeros_like(learned)
        for row, rollout in enumerate(sampled):
            entropies[row, : len(rollout.tokens)] = torch.from_numpy(rollout.entropies)
        found: list[tuple[Tensor, Tensor]] = []

        def keep_entropies(logprobs: Tensor, these: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            found.append((these.detach(), part.advantages))
            return (logprobs * 0).sum(), {}

        # The sampler's entropies travel as advantages: a learner may reorder rows.
        learner_of(model).update(dataclasses.replace(batch, advantages=entropies), keep_entropies)
        for learned, expected in found:
            torch.testing.assert_close(learned, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_completion_depends_on_nothing_that_is_sampled_beside_it(self, architecture: str) -> None:
        model = tiny_model(architecture, torch.float64)
        asked, sampling = requests(), Sampling(max_tokens=16)
        together = sampler_of(model).sample(asked, sampling)
        assert same(sampler_of(model).sample(asked, sampling), together)
        assert same(sampler_of(model, max_batch_tokens=200).sample(asked, sampling), together)
        for request, group in zip(asked, together, strict=True):
            alone = [Request(request.prompt, (one,)) for one in request.keys]
            assert same(sampler_of(model).sample(alone, sampling), [[answer] for answer in group])

    def test_another_key_gives_another_completion(self) -> None:
        sampler = sampler_of(tiny_model("qwen3"))
        answers = sampler.sample(requests(), Sampling(max_tokens=8))
        assert len({answer.tokens.tobytes() for group in answers for answer in group}) == len(PROMPTS) * GROUP

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_greedy_is_what_generate_does(self, architecture: str) -> None:
        model = tiny_model(architecture, torch.float64)
        asked = requests(group_size=1)
        answers = sampler_of(model).sample(asked, Sampling(max_tokens=15, temperature=0.0))
        for request, (answer,) in zip(asked, answers, strict=True):
            prompt = torch.from_numpy(request.prompt)[None].long()
            ids = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=15, pad_token_id=0
            )
            assert answer.tokens.tolist() == ids[0, len(request.prompt) :].tolist()
        batch = collate(rollouts(asked, answers))
        untempered = learner_of(model, temperature=1.0).logprobs(batch)
        torch.testing.assert_close(untempered.float(), batch.rollout_logprobs, atol=1e-5, rtol=0)

    def test_each_prompt_is_forwarded_once_and_no_finished_row_is(self) -> None:
        model = tiny_model("gpt2")
        counts = count_tokens_forwarded(model)
        answers = sampler_of(model, stop=range(20)).sample(requests((5, 5, 5)), Sampling(max_tokens=16))
        lengths = np.array([len(answer.tokens) for group in answers for answer in group])
        assert len(set(lengths)) > 3
        assert counts[0] == 3 * 5
        # A token that is the last of its row is drawn, but never forwarded.
        assert counts[1:] == [int((lengths > step).sum()) for step in range(1, lengths.max())]

    def test_waves_keep_within_the_budget(self) -> None:
        model = tiny_model("gpt2")
        counts = count_tokens_forwarded(model)
        sampler_of(model, stop=(), max_batch_tokens=2 * GROUP * (5 + 3)).sample(
            requests((5,) * 5), Sampling(max_tokens=3)
        )
        assert counts == [10, 8, 8, 10, 8, 8, 5, 4, 4]

    def test_a_completion_ends_with_the_stop_token_or_at_the_limit(self) -> None:
        stop = range(10)
        answers = sampler_of(tiny_model("llama"), stop=stop).sample(requests(), Sampling(max_tokens=10))
        flat = [answer for group in answers for answer in group]
        assert {answer.finish_reason for answer in flat} == {"stop", "length"}
        for answer in flat:
            assert not set(answer.tokens[:-1]) & set(stop)
            assert (answer.tokens[-1] in stop) == (answer.finish_reason == "stop")
            assert answer.finish_reason == "stop" or len(answer.tokens) == 10
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.entropies)

    @pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
    def test_a_completion_ends_where_the_context_does(self, architecture: str) -> None:
        sampler = sampler_of(tiny_model(architecture), stop=())
        (short,), (long,) = sampler.sample(requests((10, 60), group_size=1), Sampling(max_tokens=8))
        assert (len(short.tokens), len(long.tokens)) == (8, 4)
        assert long.finish_reason == "length"
        with pytest.raises(ModelError, match=r"64 tokens leaves no room in the context of 64"):
            sampler.sample(requests((64,)), Sampling(max_tokens=1))

    def test_load_copies_the_weights_of_another_model(self) -> None:
        for architecture in ("qwen3", "llama"):
            model, other = tiny_model(architecture, torch.float64), tiny_model(architecture, torch.float64, seed=1)
            sampler = sampler_of(model)
            before = sampler.sample(requests(), Sampling(max_tokens=8))
            sampler.load(learner_of(other).weights(), version=3)
            after = sampler.sample(requests(), Sampling(max_tokens=8))
            assert not same(after, before)
            assert same(after, sampler_of(other).sample(requests(), Sampling(max_tokens=8)))
            assert {answer.policy_version for group in after for answer in group} == {3}

    def test_load_of_an_unknown_weight_is_refused(self) -> None:
        sampler = sampler_of(tiny_model("llama"))
        with pytest.raises(ModelError, match=r"no\.such\.weight.*no such weight"):
            sampler.load([("no.such.weight", torch.zeros(1))], version=1)

    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (
                MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1)),
                "mamba|Mamba",
            ),
            (BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)), "takes no position_ids"),
        ],
        ids=["mamba", "bloom"],
    )
    def test_a_model_that_cannot_be_decoded_is_refused_at_once(self, model: PreTrainedModel, reason: str) -> None:
        with pytest.raises(ModelError, match=reason):
            sampler_of(model)


class TestDraw:
    def test_tokens_follow_the_softmax(self) -> None:
        logits = 2 * torch.randn(1, 50)
        count = 20_000
        tokens, _, _ = draw(logits.expand(count, -1), torch.rand(count, dtype=torch.float64))
        expected = count * logits[0].softmax(-1).double()
        chi_square = ((tokens.bincount(minlength=50) - expected).square() / expected).sum()
        assert chi_square < 49 + 4 * (2 * 49) ** 0.5  # mean and four standard deviations of chi-square(49)

    @pytest.mark.parametrize("size", [1, 2, 5, 97, 401])
    def test_equal_steps_of_the_uniform_give_each_token_its_probability(self, size: int) -> None:
        probabilities = torch.rand(size, dtype=torch.float64).softmax(-1)
        uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
        tokens, _, _ = draw(probabilities.log().expand(len(uniforms), -1), uniforms)
        assert (tokens.diff() >= 0).all()
        torch.testing.assert_close(tokens.bincount(minlength=size) / 2e4, probabilities.float(), atol=1e-4, rtol=0)

    def test_a_token_without_probability_is_never_drawn(self) -> None:
        edges = torch.tensor([0.0, 0.5, 1 - 2**-53, 2**-53], dtype=torch.float64)
        for size in (4, 30, 1001):
            for alone in range(0, size, 7):
                logits = torch.full((1, size), -torch.inf)
                logits[0, alone] = 3.0
                tokens, logprobs, entropies = draw(logits.expand(4, -1), edges)
                assert tokens.tolist() == [alone] * 4
                assert not logprobs.any()
                assert not entropies.any()
            logits = torch.randn(1, size)
            logits[0, ::3] = -torch.inf
            logits[0, -2:] = -torch.inf
            tokens, logprobs, entropies = draw(logits.expand(4, -1), edges)
            assert logprobs.isfinite().all()
            assert entropies.isfinite().all()

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({"top_k": 2}, [0, 3]),
            ({"top_k": 9}, [0, 1, 2, 3, 4]),
            ({"top_p": 0.3}, [3]),
            ({"top_p": 0.41}, [0, 3]),
            ({"top_p": 0.76}, [0, 1, 3]),
            ({"top_k": 2, "top_p": 0.6}, [0, 3]),  # of the two left, 0.4 / 0.7 < 0.6
            ({"top_k": 2, "top_p": 0.5}, [3]),
        ],
        ids=str,
    )
    def test_truncation_keeps_the_most_likely_tokens_and_renormalises(
        self, options: dict[str, Any], kept: list[int]
    ) -> None:
        probabilities = torch.tensor([0.3, 0.1, 0.1, 0.4, 0.1], dtype=torch.float64)
        wanted = torch.zeros_like(probabilities)
        wanted[kept] = probabilities[kept] / probabilities[kept].sum()
        uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
        tokens, logprobs, entropies = draw(probabilities.log().expand(len(uniforms), -1), uniforms, **options)
        torch.testing.assert_close(tokens.bincount(minlength=5) / 1e4, wanted.float(), atol=2e-4, rtol=0)
        torch.testing.assert_close(logprobs, wanted[tokens].log())
        torch.testing.assert_close(entropies[0], torch.special.entr(wanted).sum())


class TestLearner:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_neither_micro_batches_nor_row_order_nor_padding_change_a_step(self, architecture: str) -> None:
        batch = some_batch(tiny_model(architecture, torch.float64))
        order = torch.randperm(len(batch))
        shuffled = batch.rows(order)
        wider = Batch(
            **{
                name: torch.nn.functional.pad(value, (0, 3)) if value.ndim == 2 else value
                for name in batch.__slots__
                if (value := getattr(batch, name)) is not None
            }
        )
        results = []
        for variant, budget in [(batch, EVERYTHING), (batch, 60), (batch, 1), (shuffled, 60), (wider, 60)]:
            model = tiny_model(architecture, torch.float64)
            # Gradient descent, as it were: a large eps makes the step proportional to the gradient.
            settings = Optimizer(learning_rate=1e8, eps=1e8, max_grad_norm=1e9)
            metrics = learner_of(model, settings, microbatch_tokens=budget).update(variant, policy_gradient)
            results.append((metrics, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])))
        tolerance = 1e-6 if architecture == "gemma2" else 1e-10  # its attention is partly in float32
        for metrics, weights in results[1:]:
            assert metrics == pytest.approx(results[0][0], rel=tolerance, abs=tolerance)
            torch.testing.assert_close(weights, results[0][1], atol=tolerance, rtol=0)

    def test_log_probs_are_in_the_order_of_the_rows(self) -> None:
        model = tiny_model("llama", torch.float64)
        batch = some_batch(model)
        whole = learner_of(model).logprobs(batch)
        assert whole.shape == batch.tokens.shape
        assert not whole[~batch.loss_mask].any()
        torch.testing.assert_close(learner_of(model, microbatch_tokens=40).logprobs(batch), whole)

    def test_the_stop_token_is_trained(self) -> None:
        model = tiny_model("llama")
        stop = torch.arange(10)
        batch = some_batch(model, torch.float32, stop.tolist())
        last = (torch.arange(batch.tokens.shape[1]) == batch.lengths[:, None] - 1) & torch.isin(batch.tokens, stop)
        assert last.any()
        assert batch.loss_mask[last].all()

        def only_stop(logprobs: Tensor, entropies: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return -logprobs[part.loss_mask & torch.isin(part.tokens, stop)].sum(), {}

        learner = learner_of(model)
        before = learner.logprobs(batch)[last]
        assert learner.update(batch, only_stop)["grad_norm"] > 0
        assert (learner.logprobs(batch)[last] > before).all()

    def test_metrics_are_means_and_those_without_a_count_are_left_out(self) -> None:
        model = tiny_model("llama")
        batch = some_batch(model, torch.float32)
        values = batch.advantages

        def loss(logprobs: Tensor, entropies: Tensor, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            count = part.loss_mask.sum()
            return (logprobs * part.advantages).sum(), {
                "advantage": torch.stack([part.advantages.sum(), count]),
                "nothing": torch.zeros(2),
            }

        metrics = learner_of(model, microbatch_tokens=50).update(batch, loss)
        assert set(metrics) == {"advantage", "loss", "grad_norm", "learning_rate"}
        assert metrics["advantage"] == pytest.approx(float(values.sum() / batch.loss_mask.sum()), rel=1e-5)
        assert metrics["learning_rate"] == 1e-2

    @pytest.mark.parametrize("empty", ["no rows", "no gradient"])
    def test_a_step_without_signal_still_moves_by_momentum_and_decay(self, empty: str) -> None:
        batch = some_batch(tiny_model("llama", torch.float64))
        after = []
        for second, loss in [(batch, nothing), (batch.rows(torch.arange(0)), policy_gradient)]:
            model = tiny_model("llama", torch.float64)
            learner = learner_of(model, Optimizer(learning_rate=1e-2, weight_decay=0.1))
            learner.update(batch, policy_gradient)
            before = model.lm_head.weight.detach().clone()
            metrics = learner.update(second, loss)
            assert metrics["grad_norm"] == 0
            after.append(model.lm_head.weight.detach().clone())
            assert not torch.equal(after[-1], before)
        assert torch.equal(*after)

    def test_a_loss_that_is_not_finite_raises_and_changes_nothing(self) -> None:
        model = tiny_model("llama", torch.float64)
        batch = some_batch(model)
        learner, twin = learner_of(model), learner_of(tiny_model("llama", torch.float64))
        with pytest.raises(NumericalError, match=r"the loss is -?inf.*nothing was changed"):
            learner.update(batch, infinite)
        assert learner.update(batch, policy_gradient) == twin.update(batch, policy_gradient)

    def test_the_gradient_is_scaled_down_to_its_limit(self) -> None:
        model = tiny_model("llama", torch.float64)
        batch = some_batch(model)
        norms = []
        for limit in (1e-3, 1e9):
            model = tiny_model("llama", torch.float64)
            before = model.lm_head.weight.detach().clone()
            settings = Optimizer(learning_rate=1e8, eps=1e8, max_grad_norm=limit)
            norm = learner_of(model, settings).update(batch, policy_gradient)["grad_norm"]
            norms.append((norm, (model.lm_head.weight - before).norm().item()))
        assert norms[0][0] == norms[1][0] > 1e-3
        assert norms[0][1] == pytest.approx(norms[1][1] * 1e-3 / norms[0][0], rel=1e-4)

    def test_frozen_parameters_stay_and_have_no_optimizer_state(self) -> None:
        model = tiny_model("qwen3")
        batch = some_batch(model, torch.float32)
        model.requires_grad_(False)
        trained = model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        learner_of(model, Optimizer(learning_rate=1e-2, weight_decay=0.1)).update(batch, policy_gradient)
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert changed == {"model.layers.1.mlp.down_proj.weight"}
        assert trained.grad is None

    @pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
    def test_a_restored_learner_continues_bit_for_bit(self, architecture: str, tmp_path: Path) -> None:
        batch = some_batch(tiny_model(architecture), torch.float32)
        settings = Optimizer(learning_rate=1e-3, warmup_updates=2, schedule="cosine", weight_decay=0.1)
        straight, first = tiny_model(architecture), tiny_model(architecture)
        whole, half = learner_of(straight, settings), learner_of(first, settings)
        expected = [whole.update(batch, policy_gradient) for _ in range(4)]
        found = [half.update(batch, policy_gradient) for _ in range(2)]
        half.snapshot()(tmp_path)
        second = tiny_model(architecture, seed=5)
        resumed = learner_of(second, settings)
        resumed.restore(tmp_path)
        found += [resumed.update(batch, policy_gradient) for _ in range(2)]
        assert found == expected
        for (name, left), right in zip(straight.state_dict().items(), second.state_dict().values(), strict=True):
            assert torch.equal(left, right), name

    def test_a_checkpoint_that_is_incomplete_or_of_another_model_is_refused(self, tmp_path: Path) -> None:
        learner = learner_of(tiny_model("llama"))
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint"):
            learner.restore(tmp_path)
        for name in ("model.safetensors", "optimizer.pt", "updates.json"):
            learner.snapshot()(tmp_path)
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:5])
            with pytest.raises(CheckpointError, match=r"not a complete checkpoint"):
                learner.restore(tmp_path)
        learner_of(tiny_model("llama", num_hidden_layers=1)).snapshot()(tmp_path)
        with pytest.raises(CheckpointError, match="another model"):
            learner.restore(tmp_path)

    def test_weights_have_the_names_that_save_pretrained_writes(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        for architecture in ARCHITECTURES:
            model = tiny_model(architecture)
            model.save_pretrained(tmp_path / architecture)
            written = load_file(tmp_path / architecture / "model.safetensors")
            assert {name: tensor.shape for name, tensor in learner_of(model).weights()} == {
                name: tensor.shape for name, tensor in written.items()
            }

    @pytest.mark.parametrize("lazy", [False, True])
    def test_the_reference_is_another_model_and_does_not_train(self, lazy: bool) -> None:
        model, reference = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64, seed=1)
        batch = some_batch(model)
        loads: list[int] = []

        def load() -> PreTrainedModel:
            loads.append(1)
            return reference

        learner = learner_of(model, reference=load if lazy else reference)
        assert not loads
        expected = learner_of(reference).logprobs(batch)
        for _ in range(2):
            torch.testing.assert_close(learner.logprobs(batch, reference=True), expected)
            learner.update(batch, policy_gradient)
        assert len(loads) == lazy
        with pytest.raises(GroupwiseError, match="no reference was given"):
            learner_of(model).logprobs(batch, reference=True)

    def test_micro_batches_hold_every_row_once_within_the_budget(self) -> None:
        lengths = torch.tensor([3, 50, 7, 7, 20, 1, 12])
        parts = list(padded_parts(lengths, 24))
        assert sorted(torch.cat(parts).tolist()) == list(range(7))
        for part in parts:
            assert len(part) == 1 or len(part) * int(lengths[part].max()) <= 24

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
            ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
            ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.8535534, 0.5, 0.1464466]),
        ],
    )
    def test_the_learning_rate_rises_to_its_peak_and_falls(self, kind: Any, expected: list[float]) -> None:
        settings = Optimizer(warmup_updates=4, schedule=kind)
        assert [schedule(settings, update, 8) for update in range(8)] == pytest.approx(expected)


class TestTogether:
    def test_one_model_samples_and_learns_and_nothing_is_copied(self, tmp_path: Path) -> None:
        engine = local_engine(
            tiny_folder(tmp_path, "qwen3"),
            dtype=torch.float32,
            device="cpu",
            max_batch_tokens=1000,
            microbatch_tokens=100,
            optimizer=Optimizer(learning_rate=1e-2),
            temperature=1.0,
            total_updates=3,
            reference=tmp_path,
        )
        both: tuple[Sampler, Learner] = (engine.sampler, engine.learner)
        loss: LossFn = policy_gradient
        assert (engine.stop_ids, engine.context, len(engine.tokenizer)) == ((STOP,), 64, VOCABULARY)
        sampling = Sampling(max_tokens=12)
        before = both[0].sample(requests(), sampling)
        batch = collate(rollouts(requests(), before))
        batch = Batch(
            **{name: getattr(batch, name) for name in ("tokens", "lengths", "groups", "loss_mask", "rollout_logprobs")},
            advantages=torch.ones_like(batch.advantages),
            weights=batch.loss_mask.float(),
            selection=batch.selection,
        )
        torch.testing.assert_close(both[1].logprobs(batch, reference=True), batch.rollout_logprobs, atol=1e-5, rtol=0)
        both[1].update(batch, loss)
        addresses = [tensor.data_ptr() for _, tensor in both[1].weights()]
        both[0].load(both[1].weights(), version=1)
        assert [tensor.data_ptr() for _, tensor in both[1].weights()] == addresses
        after = both[0].sample(requests(), sampling)
        assert not same(after, before)
        assert after[0][0].policy_version == 1
        again = collate(rollouts(requests(), after))
        torch.testing.assert_close(both[1].logprobs(again), again.rollout_logprobs, atol=1e-5, rtol=0)

    def test_a_tokenizer_that_does_not_fit_the_model_is_refused(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path, "llama")
        tiny_tokenizer(VOCABULARY + 3).save_pretrained(folder)
        with pytest.raises(ModelError, match="100 tokens"):
            local_engine(
                folder,
                dtype=torch.float32,
                device="cpu",
                max_batch_tokens=1,
                microbatch_tokens=1,
                optimizer=Optimizer(),
                temperature=1.0,
                total_updates=1,
            )
