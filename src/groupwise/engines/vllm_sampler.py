"""The sampler in front of a vLLM server.

A group is one request, so that its prompt is read once: token ids go in; tokens, their log-probabilities and the
version of the weights that drew them come out.  After every update of its weights the server answers a fixed prompt,
and what it says is compared with the learner: weights or a prefix cache that stayed behind would otherwise go unseen.

A group is a function of its prompt, its keys and the weights, up to rounding, which depends on what else is in a batch.
vLLM does not say entropies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.busy import Busy
from groupwise.engines import Completion, Request, Sampling, Serving
from groupwise.engines.vllm_server import DYING_SECONDS, Client, LostError
from groupwise.engines.vllm_weights import tied, write
from groupwise.errors import ConfigError, EngineError, GroupwiseError, ModelError
from groupwise.model import vocabulary
from groupwise.records import Floats, Rollout, collate
from groupwise.seeding import generator, key

LOG = logging.getLogger(__name__)
GENERATE = "/inference/v1/generate"
SEEDS = 2**63 - 2**20
"""vLLM adds a completion's place in its group to the seed, which has to stay below 2**63."""
PROBES, PROBE_TOKENS = 4, 8
"""Completions of the fixed prompt, and tokens of each."""
EXACT, ROUNDED = 1e-4, 0.05
"""How far sampler and learner may be apart, where both compute in float32, and elsewhere."""


class VllmSampler:
    """Draws completions with a vLLM server, inside `with sampler.running(folder)`.  See `groupwise.engines.Sampler`."""

    def __init__(
        self,
        serving: Serving,
        outline: PreTrainedModel,
        connect: Callable[[Path], Client],
        *,
        how_to_start: str,
        restarts: int,
        folder: str | None,
        tolerance: float | None,
    ) -> None:
        """
        Args:
            outline: the model, without its weights.
            connect: who asks the server, which is not started yet; given the path of its log.
            how_to_start: a command, for messages.
            restarts: how often a server that was lost is started again.
            folder: where weights are handed over; None for the run folder.
            tolerance: how far sampler and learner may be apart; None goes by their dtypes.
        """
        self._serving, self._connect, self._how_to_start = serving, connect, how_to_start
        self._allowed, self._folder, self._given_tolerance = restarts, folder, tolerance
        self._vocabulary, self._tied = vocabulary(outline), tied(outline)
        self._run = secrets.token_hex(4)  # weights of another run never pass for ours
        self._version, self._restarts, self._lock = 0, 0, threading.Lock()
        self.busy = Busy()
        self._client: Client | None = None
        self._weights = Path()
        self._facts: dict[str, Any] = {}
        self._said: list[Completion] = []

    @contextlib.contextmanager
    def running(self, folder: Path, say: Callable[[str], None] = LOG.info) -> Generator[None]:
        """A server, with the learner's weights, for as long as this lasts.

        Args:
            folder: of the run; the server's log is vllm/server.log in it.
            say: told what is waited for.

        Raises:
            GroupwiseError: the server does not start, is none that can be used, or disagrees with the learner.
        """
        place = folder / "vllm"
        place.mkdir(parents=True, exist_ok=True)
        # The same name when the run is resumed, so that none is left behind by one that was killed.
        name = f"groupwise-{key(str(place.resolve())):016x}.safetensors"
        self._weights = Path(self._folder or place).resolve() / name
        client = self._client = self._connect(place / "server.log")
        say(f"waiting for {client.home.name}")
        try:
            try:
                client.start()
                self._facts = self._look_at(client)
            except LostError as error:
                raise EngineError(
                    f"{client.home.name} did not start: {client.home.fate(DYING_SECONDS) or error}"
                ) from error
            self.load(self._serving.weights(), 0)
            yield
        finally:
            client.close()
            with self._lock:  # which a thread that samples ahead, and was starting a server, lets go of
                client.home.stop()
                self._weights.unlink(missing_ok=True)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand the server these weights, by a file; requests under way go on with them.

        Raises:
            GroupwiseError: the server refuses them, was lost too often, or disagrees with the learner afterwards.
        """
        with self._lock:
            write(self._weights, weights, getattr(torch, self._facts["dtype"]), self._tied)
            self._version = version
            self._hand_over(self._compare)
            self._serving.loaded(version)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """For each request, its completions in the order of its keys; groups that were lost are sampled again.

        Several threads may ask, also while `load` hands over weights, with which groups under way then go on.
        At temperature 0 the log-probabilities are those at temperature 1.

        Raises:
            ModelError: a prompt leaves no room in the model's context.
            GroupwiseError: the server refuses a request, or was lost too often.
        """
        bodies = [self._body(request, sampling) for request in requests]
        groups: dict[int, list[Completion]] = {}
        while missing := [i for i in range(len(requests)) if i not in groups]:
            with self._lock:  # a server that is being started, or given weights, is waited for
                restarts = self._restarts
            with self.busy.working():
                answers = self._server.ask(GENERATE, [bodies[i] for i in missing])
            losses = [answer for answer in answers if isinstance(answer, LostError)]
            for i, answer in zip(missing, answers, strict=True):
                if isinstance(answer, LostError):
                    continue
                try:
                    groups[i] = self._group(answer, len(requests[i].keys))
                except LostError as error:
                    losses.append(error)
            with self._lock:
                if losses and self._restarts == restarts:  # unless a `load` in another thread found out first
                    self._hand_over(self._compare_with_before, losses[0])
        return [groups[i] for i in range(len(requests))]

    # A group ---------------------------------------------------------------------------------------------------------

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        prompt, context, count = len(request.prompt), self._facts["context"], len(request.keys)
        if prompt >= context:
            raise ModelError(f"a prompt of {prompt} tokens leaves no room in the context of {context}; shorten it")
        if count > self._facts["sequences"]:
            raise ConfigError(
                f"engine.sampler.max_sequences: {self._facts['sequences']}; a group has {count} completions; set it "
                "to at least that"
            )
        greedy = sampling.temperature == 0.0
        return {
            "token_ids": request.prompt.tolist(),
            "sampling_params": {
                "n": 1 if greedy else count,  # the others are the same
                "seed": key("vllm", *request.keys) % SEEDS,
                "max_tokens": min(sampling.max_tokens, context - prompt),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "logprobs": 0,
                "stop_token_ids": list(self._serving.stop_ids),
                "detokenize": False,
            },
        }

    def _group(self, answer: Any, count: int) -> list[Completion]:
        """
        Raises:
            LostError: the weights that drew it are not ours.
        """
        found = [self._completion(choice) for choice in sorted(answer["choices"], key=_place)]
        return found * (count // len(found))

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens, spans = choice["token_ids"], choice["weight_versions"] or [{"version": "none"}]
        run, _, version = spans[0]["version"].rpartition(".")
        if run != self._run:
            raise LostError(f"the server has weights {spans[0]['version']!r} that are not of this run")
        if choice["finish_reason"] not in ("stop", "length"):
            raise LostError(f"a completion ended with {choice['finish_reason']!r}")
        return Completion(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32),
            entropies=None,
            finish_reason=choice["finish_reason"],
            policy_version=int(version),
        )

    # Weights ---------------------------------------------------------------------------------------------------------

    def _hand_over(self, compare: Callable[[], None], loss: LostError | None = None) -> None:
        """Publish the weights of the last `load`, to a new server where the old one was lost.

        Raises:
            GroupwiseError: the server was lost too often, or `compare` refuses.
        """
        while True:
            try:
                if loss is not None:
                    self._restart(loss)
                self._publish()
                compare()
                return
            except LostError as error:
                loss = error

    def _publish(self) -> None:
        """Hand over the file.  Between a failed update and the next one, an engine that is not paused would die."""
        server = self._server
        server.call("/pause?mode=keep")
        server.call("/collective_rpc", {"method": "groupwise_load", "args": [str(self._weights)]})
        # Keys and values of prompts belong to the weights that computed them, those of requests under way, too.
        if not server.call("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise GroupwiseError(f"{server.home.name} cannot forget the keys and values of older weights")
        server.call("/update_weight_version", {"new_version": f"{self._run}.{self._version}"})
        server.call("/resume")

    def _restart(self, loss: LostError) -> None:
        """Have a server again, with any weights.

        Raises:
            LostError: it is lost again.
            GroupwiseError: it was lost too often.
        """
        server = self._server
        why = server.home.fate(DYING_SECONDS) or loss
        reason = f"{server.home.name} was lost after {self._version} training steps: {why}"
        if self._restarts >= self._allowed:
            raise EngineError(f"{reason}; engine.sampler.restarts: {self._allowed} allows no more") from loss
        self._restarts += 1
        LOG.warning("%s; restart %d of %d", reason, self._restarts, self._allowed)
        server.start()
        self._look_at(server)

    # Trust -----------------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Refuse to go on when the server does not say what the learner says."""
        self._said = self._answer_probe()
        prompt = self._probe().prompt
        rollouts = [
            Rollout(
                tokens=np.concatenate([prompt, said.tokens]),
                loss_mask=np.arange(len(prompt) + len(said.tokens)) >= len(prompt),
                logprobs=np.concatenate([np.zeros(len(prompt), np.float32), said.logprobs]),
                group=0,
            )
            for said in self._said
        ]
        batch = collate(rollouts)
        learner = self._serving.logprobs(batch)[batch.loss_mask].double()
        self._refuse_beyond(float((learner - batch.rollout_logprobs[batch.loss_mask]).abs().mean()), "the learner")

    def _compare_with_before(self) -> None:
        """The same, of a server that was started again: the learner may be elsewhere by now."""
        pairs = zip(self._said, self._answer_probe(), strict=True)
        differences = np.concatenate([_difference(before, now) for before, now in pairs])
        self._refuse_beyond(float(differences.mean()) if len(differences) else math.inf, "the server that was lost")

    def _refuse_beyond(self, difference: float, other: str) -> None:
        tolerance = self._tolerance
        if not difference <= tolerance:
            raise GroupwiseError(
                f"after {self._version} training steps {self._server.home.name} and {other} disagree on log-probs by "
                f"{difference:.2g} nats a token at the same weights (engine.sampler.tolerance: {tolerance:g}): some "
                "weights did not arrive, or are computed with differently; set the same dtype for both "
                "(engine.sampler.dtype), or a larger tolerance if rounding is all it is"
            )

    @property
    def _tolerance(self) -> float:
        exact = self._facts["dtype"] == "float32" and self._serving.dtype != torch.bfloat16 and not self._serving.mixed
        return self._given_tolerance or (EXACT if exact else ROUNDED)

    def _probe(self) -> Request:
        """The fixed prompt: some whole blocks of keys and values, so that stale ones would be found."""
        length = max(1, min(2 * self._facts["block"] + 1, self._facts["context"] - PROBE_TOKENS))
        prompt = generator("vllm probe").integers(0, self._vocabulary, length).astype(np.int32)
        return Request(prompt, tuple(key("vllm probe", i) for i in range(min(PROBES, self._facts["sequences"]))))

    def _answer_probe(self) -> list[Completion]:
        """
        Raises:
            LostError: the server is gone.
        """
        probe, sampling = self._probe(), Sampling(max_tokens=PROBE_TOKENS, temperature=self._serving.temperature)
        answer = self._server.ask(GENERATE, [self._body(probe, sampling)])[0]
        if isinstance(answer, LostError):
            raise answer
        return self._group(answer, len(probe.keys))

    def _look_at(self, server: Client) -> dict[str, Any]:
        """What the server says of itself.

        Raises:
            GroupwiseError: it cannot be used.
            LostError: it is gone.
        """
        try:
            facts = server.call("/collective_rpc", {"method": "groupwise_facts"})["results"][0]
        except GroupwiseError as error:
            raise GroupwiseError(
                f"{server.home.name} has no worker of ours, so it cannot take weights ({error}); start it with: "
                f"{self._how_to_start}"
            ) from error
        if facts["logprobs_mode"] != "processed_logprobs":
            raise GroupwiseError(
                f"{server.home.name}: --logprobs-mode {facts['logprobs_mode']}; the log-probs have to be those of the "
                "distribution drawn from: start it with --logprobs-mode processed_logprobs"
            )
        if facts["device"].startswith("cpu") and facts["chunked_prefill"]:
            raise GroupwiseError(
                f"{server.home.name} reads prompts in chunks, which ends vLLM on a CPU when a request has a seed; "
                f"start it with: {self._how_to_start}"
            )
        return facts

    @property
    def _server(self) -> Client:
        assert self._client is not None, "only inside `with sampler.running(folder)`"
        return self._client


def _place(choice: dict[str, Any]) -> int:
    return choice["index"]


def _difference(before: Completion, now: Completion) -> Floats:
    """Of the log-probs, as far as the two say the same: beside a rounding they may go on differently."""
    width = min(len(before.tokens), len(now.tokens))
    same = int(np.cumprod(before.tokens[:width] == now.tokens[:width]).sum())
    return np.abs(before.logprobs[:same] - now.logprobs[:same])
