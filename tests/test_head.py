from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, TEMPERATURE, VOCABULARY, by_the_definition, gradient, ragged_rows, tiny_model
from torch import Tensor

from groupwise import head as module
from groupwise.head import learn, pieces, token_logprobs
from groupwise.model import states_before
from groupwise.presets import PRESETS
from groupwise.records import Batch


@pytest.mark.parametrize("rows_per_chunk", [5, 1000])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_and_their_gradient_are_those_of_the_definition(
    architecture: str, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", rows_per_chunk * VOCABULARY)
    model = tiny_model(architecture, torch.float64)
    tokens, lengths, mask = ragged_rows()
    weights = torch.randn(2, *tokens.shape, dtype=torch.float64)

    logprobs, entropies = token_logprobs(model, tokens, lengths, mask, TEMPERATURE, entropy=True)
    found = gradient(model, (weights[0] * logprobs + weights[1] * entropies).sum())
    expected = by_the_definition(model, tokens, mask)
    wanted = gradient(model, (weights[0] * expected[0] + weights[1] * expected[1]).sum())

    torch.testing.assert_close(logprobs, expected[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(entropies, expected[1], atol=1e-10, rtol=0)
    tolerance = 1e-5 if architecture == "gemma2" else 1e-10  # its attention is partly in float32
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_what_stands_in_the_padding_changes_nothing() -> None:
    model = tiny_model("gemma2", torch.float64)
    tokens, lengths, mask = ragged_rows()
    garbage = torch.where(torch.arange(13) < lengths[:, None], tokens, 5)
    wider = torch.nn.functional.pad(garbage, (0, 4), value=7), lengths, torch.nn.functional.pad(mask, (0, 4))
    logprobs, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)
    others, _ = token_logprobs(model, *wider, 1.0, entropy=False)
    torch.testing.assert_close(others[:, :13], logprobs, atol=1e-12, rtol=0)
    assert not others[:, 13:].any()


def test_only_masked_positions_reach_the_head_and_never_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 8 * VOCABULARY + 3)
    model = tiny_model("qwen3")
    tokens, lengths, mask = ragged_rows()
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: rows.append(logits.shape[:-1].numel()))

    logprobs, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=True)
    scored = int(mask.sum())
    assert sum(rows) == scored
    assert max(rows) == 8
    logprobs.sum().backward()
    assert sum(rows) == 2 * scored  # each chunk once more, instead of being kept
    assert max(rows) == 8


def test_entropies_are_computed_only_when_asked_for() -> None:
    model = tiny_model("llama", torch.float64)
    tokens, lengths, mask = ragged_rows()
    assert token_logprobs(model, tokens, lengths, mask, 1.0, entropy=True)[1].requires_grad
    assert not token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)[1].any()


def test_half_precision_weights_give_float32_scores() -> None:
    model = tiny_model("llama", torch.bfloat16)
    tokens, lengths, mask = ragged_rows()
    found, _ = token_logprobs(model, tokens, lengths, mask, 1.0, entropy=False)
    exact, _ = token_logprobs(model.double(), tokens, lengths, mask, 1.0, entropy=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=0.3, rtol=0)


def ragged_batch() -> Batch:
    tokens, lengths, mask = ragged_rows()
    zeros = torch.zeros(tokens.shape, dtype=torch.float64)
    return Batch(
        tokens=tokens,
        lengths=lengths,
        groups=torch.arange(len(tokens)),
        loss_mask=mask,
        rollout_logprobs=zeros,
        advantages=torch.randn_like(zeros) * mask,
        weights=torch.rand_like(zeros) * mask,
        selection=torch.ones_like(zeros),
        old_logprobs=-3 + torch.randn_like(zeros),
        ref_logprobs=-3 + torch.randn_like(zeros),
    )


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 9, 1000])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "reinforce_pp_baseline"])
def test_the_gradient_that_is_formed_with_the_logits_is_that_of_the_definition(
    name: str, tokens_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, model, batch = PRESETS[name], tiny_model("qwen3", torch.float64), ragged_batch()
    states = states_before(model, batch.tokens, batch.lengths, batch.loss_mask)
    logprobs, entropies = by_the_definition(model, batch.tokens, batch.loss_mask)
    value, metrics = algorithm.loss(logprobs, entropies, batch)
    wanted = gradient(model, value)

    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCABULARY)
    found, sums = learn(model, states, batch, algorithm.loss, TEMPERATURE, per_token=algorithm.per_token)
    torch.testing.assert_close(found, value.detach(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), wanted, atol=1e-12, rtol=1e-9)
    for metric, total in metrics.items():
        torch.testing.assert_close(sums[metric], total.double(), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(("per_token", "expected"), [(True, [8, 8, 8]), (False, [8, 1, 1, 8, 7, 8])])
def test_a_token_goes_through_the_head_once_unless_its_row_is_longer_than_a_chunk(
    per_token: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 8 * VOCABULARY)
    model, batch = tiny_model("qwen3"), ragged_batch()
    states = states_before(model, batch.tokens, batch.lengths, batch.loss_mask)
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: rows.append(len(logits)))
    learn(model, states, batch, PRESETS["grpo"].loss, 1.0, per_token=per_token)
    assert rows == expected


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 6, 100])
def test_pieces_hold_every_loss_token_once_in_order(tokens: int, per_token: bool) -> None:
    batch = ragged_batch()
    seen: list[Tensor] = []
    for (begin, end), piece in pieces(batch, tokens, per_token):
        assert end - begin == int(piece.loss_mask.sum()) <= (tokens if per_token else max(tokens, 10))
        seen.append(piece.tokens[piece.loss_mask])
    assert torch.equal(torch.cat(seen), batch.tokens[batch.loss_mask])
