"""A vLLM server as seen from here: started and ended with the run, or found at a URL; and what is asked of it.

A server of our own listens on a socket in a private folder: its endpoints for weights ask for no password.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx2

from groupwise.errors import EngineError, GroupwiseError

SIDE = Path(__file__).parent / "vllm_side"
"""What runs in vLLM's environment, or beside it."""
WORKER = "groupwise_worker.Worker"
AT_ONCE = 256
"""Most groups under way at a time."""
LOOK_SECONDS = 0.2
"""Between two looks at whether a server is there."""
HEALTH_SECONDS = 10.0
"""How long a server may take to say how it is."""
DYING_SECONDS = 2.0
"""How long a server that has failed may still look alive."""
TAIL = 16384
"""Bytes at the end of a log in which the reason of a death is looked for."""


class LostError(Exception):
    """The server is gone, does not answer, or no longer has our weights."""


Body = Mapping[str, Any]
Response = httpx2.Response | LostError


class Home(Protocol):
    """Where a server is."""

    name: str
    """For messages."""

    def reach(self) -> dict[str, Any]:
        """What an httpx2 transport needs to connect."""
        ...

    @property
    def url(self) -> str:
        """The base of all paths."""
        ...

    def start(self) -> None:
        """Bring the server up, if that is ours to do."""
        ...

    def fate(self, patience: float = 0.0) -> str | None:
        """What became of it, as far as can be seen from here within so many seconds; None while it may be running."""
        ...

    def stop(self) -> None:
        """End the server, if that is ours to do."""
        ...


class Found:
    """A server that somebody else runs."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = f"the vLLM server at {self.url}"

    def reach(self) -> dict[str, Any]:
        """See `Home`."""
        return {}

    def start(self) -> None:
        """Whoever runs it starts it again."""

    def fate(self, patience: float = 0.0) -> str | None:
        """Cannot be seen from here."""
        return None

    def stop(self) -> None:
        """It is not ours."""


class Started:
    """A server of our own, that ends when this process does, however it does."""

    url = "http://vllm"

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """
        Args:
            command: starts the server; `--uds` is added.
            environment: all of it.
            log: what the server says is added to this file.
        """
        self.name = f"the vLLM server (its log: {log})"
        self._command, self._environment, self._log = [*command], dict(environment), log
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.group = 0
        """Number of its process group, which is that of its first process."""

    @property
    def socket(self) -> str:
        """The path that it listens on."""
        return f"{self._folder}/socket"

    def reach(self) -> dict[str, Any]:
        """See `Home`."""
        return {"uds": self.socket}

    def start(self) -> None:
        """Start it; it is not ready then."""
        self.stop()
        self._folder = tempfile.mkdtemp(prefix="groupwise-vllm-")  # that nobody else may enter
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(SIDE / "groupwise_watch.py"), *self._command, "--uds", self.socket],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends the server
            )
        assert self._process.stdout is not None
        self.group = int(self._process.stdout.readline() or 0)

    def fate(self, patience: float = 0.0) -> str | None:
        """See `Home`; a server that ends by itself may well do so with code 0."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        return f"it ended with code {code}: {self._last_words()}"

    def stop(self) -> None:
        """End it with all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # closing its standard input asks it to end, and leaving waits for that
                pass
            if process.returncode < 0 and self.group:  # somebody killed who watches over it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.group, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - TAIL))
            lines = log.read().decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()]
        return next((line for line in reversed(told) if "Error" in line), told[-1] if told else "it said nothing")


class Client:
    """Asks a server."""

    def __init__(self, home: Home, *, timeout_seconds: float, startup_seconds: float) -> None:
        self.home, self._timeout, self._startup = home, timeout_seconds, startup_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing is asked any more: other threads, which may be waiting for an answer, get an EngineError."""
        self._closed.set()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            LostError: it ended, or did not come up in time.
            EngineError: the run has ended.
        """
        self._refuse_closed()
        self.home.start()
        give_up = time.monotonic() + self._startup
        while not self.healthy():
            if fate := self.home.fate():
                raise LostError(fate)
            if time.monotonic() > give_up:
                raise LostError(f"no answer within {self._startup:g} seconds (startup_seconds)")
            time.sleep(LOOK_SECONDS)

    def healthy(self) -> bool:
        """Whether it answers, and has an engine that lives."""
        (response,) = self._send("GET", [("/health", None)], HEALTH_SECONDS)
        return not isinstance(response, LostError) and response.is_success

    def call(self, path: str, body: Body | None = None) -> Any:
        """The answer to a POST.

        Raises:
            LostError: the server is gone.
            GroupwiseError: it refuses.
        """
        (response,) = self._send("POST", [(path, body)], self._timeout)
        return self._content(path, response)

    def ask(self, path: str, bodies: Sequence[Body]) -> list[Any | LostError]:
        """The answers to POSTs that are under way at the same time; several threads may ask.

        Raises:
            GroupwiseError: the server refuses one, or the run has ended.
        """
        responses = self._send("POST", [(path, body) for body in bodies], self._timeout)
        return [self._content_or_loss(path, response) for response in responses]

    def _send(self, method: str, asked: Sequence[tuple[str, Body | None]], timeout: float) -> list[Response]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._send_all(method, asked, timeout))
        with ThreadPoolExecutor(max_workers=1) as thread:  # a notebook already runs a loop in this one
            return thread.submit(lambda: asyncio.run(self._send_all(method, asked, timeout))).result()

    async def _send_all(self, method: str, asked: Sequence[tuple[str, Body | None]], timeout: float) -> list[Response]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def send_one(path: str, body: Body | None) -> Response:
            try:
                # The time limit of an answer is ours: the client's is for each read.
                async with turns, asyncio.timeout(timeout):
                    return await client.request(method, path, json=body)
            except TimeoutError:
                return LostError(f"{path}: no answer within {timeout:g} seconds (timeout_seconds)")
            except httpx2.TransportError as error:
                return LostError(f"{path}: {type(error).__name__}: {error}")

        limits = httpx2.Limits(max_connections=AT_ONCE)
        verify = self.home.url.startswith("https")  # making a context for TLS takes long
        transport = httpx2.AsyncHTTPTransport(limits=limits, verify=verify, **self.home.reach())
        async with httpx2.AsyncClient(transport=transport, base_url=self.home.url, timeout=None) as client:
            answers = asyncio.gather(*(send_one(path, body) for path, body in asked))
            while not answers.done():
                if self._closed.is_set():
                    answers.cancel()  # which takes the requests back
                await asyncio.wait([answers], timeout=LOOK_SECONDS)
            self._refuse_closed()
            return answers.result()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise EngineError(f"{self.home.name} is asked for nothing any more: the run has ended")

    def _content_or_loss(self, path: str, response: Response) -> Any | LostError:
        try:
            return self._content(path, response)
        except LostError as error:
            return error

    def _content(self, path: str, response: Response) -> Any:
        if isinstance(response, LostError):
            raise response
        if response.is_success:
            return response.json() if response.content else None
        problem = f"{path}: {response.status_code}: {response.text[:500]}"
        if response.is_server_error and self._dies():
            raise LostError(problem)
        raise GroupwiseError(f"{self.home.name} refuses {problem}")

    def _dies(self) -> bool:
        """Whether a server that has failed at something is gone, or goes now."""
        give_up = time.monotonic() + DYING_SECONDS
        while time.monotonic() < give_up:
            if self.home.fate() is not None or not self.healthy():
                return True
            time.sleep(LOOK_SECONDS)
        return False
