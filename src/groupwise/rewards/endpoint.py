"""Asking an OpenAI-compatible endpoint many things at once, with patience for a server that is busy or away."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

FIRST_WAIT_SECONDS = 1.0
"""Before the second attempt; each further wait is twice as long, and some of it is left to chance."""
LONGEST_WAIT_SECONDS = 120.0
"""A server that asks for more patience than this is taken to be away."""
BUSY = (408, 429)
_CHANCE = random.SystemRandom()  # waiting must not move the generators that others seed


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one question."""

    text: str = ""
    problem: str = ""
    """Why there is no text."""
    again: bool = False
    """Whether to ask again may help."""
    wait_seconds: float = 0.0
    """How long the server wants to be left alone before."""


@dataclass
class _Asking:
    """What the requests of one call share."""

    client: httpx2.AsyncClient
    turns: asyncio.Semaphore
    answered: int = 0
    away: str = ""
    """Why the server is taken to be away: a request was given up, and no other was answered in all that time."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how patiently."""

    url: str
    """Of the chat completions."""
    key: str
    """Sent as the bearer token; none when empty."""
    concurrency: int
    timeout_seconds: float
    retries: int

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """The answers to these requests, in order; at most `concurrency` of them are under way at a time.

        A request that fails in a way that may pass (429, 408, 5xx, no connection, no answer in time) is sent again up
        to `retries` times, after waits that double, but never sooner than the server's Retry-After.  Once one is given
        up while no other was answered, the rest are not sent: a server that is away costs one request's patience.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._ask_all(bodies))
        with ThreadPoolExecutor(max_workers=1) as thread:  # a notebook already runs a loop in this one
            return thread.submit(lambda: asyncio.run(self._ask_all(bodies))).result()

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        import httpx2

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # The time limit of an attempt is ours: the client's is for each read, and a server may trickle.
        async with httpx2.AsyncClient(headers=headers, timeout=None) as client:
            asking = _Asking(client, asyncio.Semaphore(self.concurrency))
            return await asyncio.gather(*(self._ask_patiently(asking, body) for body in bodies))

    async def _ask_patiently(self, asking: _Asking, body: Mapping[str, Any]) -> Answer:
        async with asking.turns:  # kept while waiting, too: a server that is busy gets less to do
            if asking.away:
                return Answer(problem=f"not asked: {asking.away}")
            answered_before, attempt = asking.answered, 1
            answer = await self._ask_once(asking.client, body)
            while answer.again and attempt <= self.retries and answer.wait_seconds <= LONGEST_WAIT_SECONDS:
                doubled = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
                await asyncio.sleep(max(answer.wait_seconds, _CHANCE.uniform(doubled / 2, doubled)))
                answer, attempt = await self._ask_once(asking.client, body), attempt + 1
            if not answer.again:
                asking.answered += 1
                return answer
            problem = f"{answer.problem} (attempt {attempt})"
            if asking.answered == answered_before:
                asking.away = problem
            return Answer(problem=problem)

    async def _ask_once(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Answer:
        import httpx2

        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await client.post(self.url, json=body)
        except TimeoutError:
            return Answer(problem=f"{self.url}: no answer within {self.timeout_seconds:g} seconds", again=True)
        except httpx2.TransportError as error:
            return Answer(problem=f"{self.url}: {type(error).__name__}: {error}", again=True)
        if response.is_success:
            return _content(response)
        return Answer(
            problem=f"{self.url}: {response.status_code}: {response.text[:200]}",
            again=response.status_code in BUSY or response.status_code >= 500,
            wait_seconds=_retry_after(response.headers.get("Retry-After", "")),
        )


def _content(response: httpx2.Response) -> Answer:
    try:
        text = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        text = None
    if isinstance(text, str) and text.strip():
        return Answer(text)
    return Answer(problem=f"{response.url}: answered without a message: {response.text[:200]!r}")


def _retry_after(header: str) -> float:
    """Seconds, from a header that says seconds or a date; 0 when it says neither."""
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
