"""A pool of samplers loses no group: whoever is free samples those of a member that died, with the same weights."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from groupwise.engines import Completion, Request, Sampling
from groupwise.engines.pool import TRIES, Member, Pool, Published
from groupwise.errors import EngineError, ModelError

SAMPLING = Sampling(max_tokens=4)
SOON = 10.0
"""Seconds after which a test has failed rather than that it waits."""


class Scripted:
    """A member whose every `sample` does what the test says: `act` is handed the prompts and the weights."""

    def __init__(self, name: str, act: Callable[[list[int], Published], None] = lambda prompts, weights: None) -> None:
        self.name, self.act, self.starts = name, act, 0
        self.did: list[tuple[list[int], int]] = []
        self.start_up: Callable[[], None] = lambda: None
        self.closed = threading.Event()

    def sample(self, requests: Sequence[Request], sampling: Sampling, weights: Published) -> list[list[Completion]]:
        prompts = [int(request.prompt[0]) for request in requests]
        self.act(prompts, weights)
        self.did.append((prompts, weights.version))
        return [
            [said(prompt, key, weights.version) for key in r.keys] for prompt, r in zip(prompts, requests, strict=True)
        ]

    def start(self) -> None:
        self.starts += 1
        self.start_up()

    def close(self) -> None:
        self.closed.set()


def said(prompt: int, key: int, version: int) -> Completion:
    empty = np.zeros(1, dtype=np.float32)
    return Completion(np.array([prompt, key], dtype=np.int32), empty, empty, "stop", version)


def asked(count: int) -> list[Request]:
    return [Request(np.array([prompt], dtype=np.int32), (10 * prompt, 10 * prompt + 1)) for prompt in range(count)]


def answers(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens.tolist() for completion in group] for group in groups]


def right(count: int) -> list[list[list[int]]]:
    return [[[prompt, key] for key in request.keys] for prompt, request in enumerate(asked(count))]


@pytest.fixture
def pool_of() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(*members: Member, patience: float = SOON) -> Pool:
        pools.append(Pool(members, patience=patience))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def later(pool: Pool, count: int) -> Future[list[list[Completion]]]:
    """What the pool says to so many requests, asked in another thread."""
    return ThreadPoolExecutor(1).submit(pool.sample, asked(count), SAMPLING)


@pytest.mark.parametrize("members", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [0, 1, 2, 5])
def test_groups_come_back_in_the_order_of_their_requests(
    members: int, groups: int, pool_of: Callable[..., Pool]
) -> None:
    pool = pool_of(*(Scripted(f"sampler {i}") for i in range(members)))
    assert answers(pool.sample(asked(groups), SAMPLING)) == right(groups)


def test_a_free_member_samples_what_a_lost_one_had_and_does_not_wait_for_its_restart(
    pool_of: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    started, seen = threading.Event(), threading.Event()

    def die(prompts: list[int], weights: Published) -> None:
        seen.set()
        raise EngineError("sampler 1 (pid 7 on host) died")

    lost = Scripted("sampler 1", die)
    kept = Scripted("sampler 2", lambda prompts, weights: None if seen.wait(SOON) else pytest.fail("nobody died"))
    lost.start_up = lambda: None if started.wait(SOON) else pytest.fail("it was waited for")
    pool = pool_of(lost, kept)
    with caplog.at_level(logging.WARNING):
        assert answers(pool.sample(asked(4), SAMPLING)) == right(4)
    assert sorted(prompt for prompts, _ in kept.did for prompt in prompts) == [0, 1, 2, 3]
    assert "sampler 1 (pid 7 on host) died; it was sampling group" in caplog.text
    assert "with the policy after step 0" in caplog.text
    lost.act = lambda prompts, weights: None
    started.set()
    while lost not in [member for member in (lost, kept) if member.did]:  # it takes part again
        pool.sample(asked(2), SAMPLING)
    assert lost.starts == 1


def test_groups_that_are_sampled_again_get_the_weights_that_their_call_began_with(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(member := Scripted("sampler 1"))
    pool.load([], version=3)

    def publish_and_die(prompts: list[int], weights: Published) -> None:
        member.act = lambda prompts, weights: None
        pool.load([], version=4)
        raise EngineError("died")

    member.act = publish_and_die
    assert {completion.policy_version for group in pool.sample(asked(3), SAMPLING) for completion in group} == {3}
    assert {completion.policy_version for group in pool.sample(asked(3), SAMPLING) for completion in group} == {4}


def test_a_call_that_waits_begins_with_the_newest_weights(pool_of: Callable[..., Pool]) -> None:
    go, begun = threading.Event(), threading.Event()

    def wait(prompts: list[int], weights: Published) -> None:
        begun.set()
        assert go.wait(SOON)

    pool = pool_of(Scripted("sampler 1", wait))
    first = later(pool, 1)
    assert begun.wait(SOON)
    second = later(pool, 1)
    pool.load([], version=1)
    go.set()
    assert [future.result(SOON)[0][0].policy_version for future in (first, second)] == [0, 1]


def test_weights_that_are_published_again_are_another_publication(pool_of: Callable[..., Pool]) -> None:
    numbers: list[int] = []
    pool = pool_of(Scripted("sampler 1", lambda prompts, weights: numbers.append(weights.number)))
    for _ in range(2):  # a learner that was lost trains step 5 a second time
        pool.load([], version=5)
        pool.sample(asked(1), SAMPLING)
    assert len(set(numbers)) == 2


def test_groups_that_take_every_sampler_down_end_the_run(pool_of: Callable[..., Pool]) -> None:
    def die(prompts: list[int], weights: Published) -> None:
        raise EngineError("sampler 1 (pid 7 on host) died")

    pool = pool_of(member := Scripted("sampler 1", die))
    with pytest.raises(EngineError, match=r"died; it is the sampler number 3 .* group 1: .* engine.sample_tokens"):
        pool.sample(asked(1), SAMPLING)
    member.act = lambda prompts, weights: None
    assert answers(pool.sample(asked(1), SAMPLING)) == right(1), "it was started anew all the same"
    assert member.starts == TRIES


def test_without_a_sampler_that_starts_there_is_an_end(pool_of: Callable[..., Pool]) -> None:
    def die(*_: object) -> None:
        raise EngineError("no machine left")

    pool = pool_of(member := Scripted("sampler 1", die))
    member.start_up = die
    for _ in range(2):  # those that wait, and whoever comes later
        with pytest.raises(EngineError, match=r"no sampler is left|cannot be started anew"):
            pool.sample(asked(1), SAMPLING)
    assert member.starts == TRIES


def test_what_is_wrong_with_the_request_is_raised_where_it_was_made(pool_of: Callable[..., Pool]) -> None:
    def refuse(prompts: list[int], weights: Published) -> None:
        if 2 in prompts:
            raise ModelError("no room")

    pool = pool_of(Scripted("sampler 1", refuse), Scripted("sampler 2", refuse))
    with pytest.raises(ModelError, match="no room"):
        pool.sample(asked(4), SAMPLING)
    assert answers(pool.sample(asked(2), SAMPLING)) == right(2)


def test_earlier_calls_come_first(pool_of: Callable[..., Pool]) -> None:
    turns: queue.Queue[None] = queue.Queue()
    begun: queue.Queue[None] = queue.Queue()

    def in_turn(prompts: list[int], weights: Published) -> None:
        begun.put(None)
        turns.get(timeout=SOON)

    pool = pool_of(member := Scripted("sampler 1", in_turn))
    calls = []
    for count in (1, 2, 3):
        calls.append(later(pool, count))
        begun.get(timeout=SOON) if count == 1 else time.sleep(0.05)
    for _ in range(3):
        turns.put(None)
    for call in calls:
        call.result(SOON)
    assert [len(prompts) for prompts, _ in member.did] == [1, 2, 3]


def test_it_says_who_is_waited_for(pool_of: Callable[..., Pool], caplog: pytest.LogCaptureFixture) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(prompts: list[int], weights: Published) -> None:
        begun.set()
        assert go.wait(SOON)

    def leave_one(prompts: list[int], weights: Published) -> None:
        assert begun.wait(SOON)

    slow, quick = Scripted("sampler 1 (pid 7 on host)", wait), Scripted("sampler 2", leave_one)
    pool = pool_of(slow, quick, patience=0.05)
    pool.load([], version=8)
    with caplog.at_level(logging.WARNING):
        call, deadline = later(pool, 2), time.monotonic() + SOON
        while "free: sampler 2" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        go.set()
    assert answers(call.result(SOON)) == right(2)
    said = "for completions (the policy is that after step 8): for sampler 1 (pid 7 on host), which samples group "
    assert said in caplog.text
    assert "free: sampler 2" in caplog.text


def test_whoever_waits_when_it_is_closed_is_told(pool_of: Callable[..., Pool]) -> None:
    begun = threading.Event()

    def until_closed(prompts: list[int], weights: Published) -> None:
        begun.set()
        assert member.closed.wait(SOON)
        raise EngineError("it was ended")

    pool = pool_of(member := Scripted("sampler 1", until_closed))
    calls = [later(pool, 1)]
    assert begun.wait(SOON)
    calls.append(later(pool, 1))
    pool.close()
    for call in calls:
        with pytest.raises(EngineError, match=r"it was ended|closed"):
            call.result(SOON)
    with pytest.raises(EngineError, match="closed"):
        pool.sample(asked(1), SAMPLING)
    assert member.starts == 0


def test_the_idle_share_is_that_of_all_members(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(*(Scripted(f"sampler {i}", lambda prompts, weights: time.sleep(0.4)) for i in range(2)))
    pool.idle()
    pool.sample(asked(1), SAMPLING)  # one of the two works
    assert 0.4 < pool.idle() < 0.7
    call = later(pool, 2)
    time.sleep(0.2)
    assert pool.idle() < 0.3, "what is under way counts"
    call.result(SOON)
