"""A stand-in for a vLLM server, standard library only, so that it is up at once: what it is asked, and how it fails.

    python vllm_stub.py ... --uds SOCKET      as `engine.sampler.python` it is what starts the server
    with serve(answers) as url: ...           inside a test

It writes a token for each it is asked for, all of log-prob 0 unless told otherwise, and remembers weights by the path
it was told to load.  A test tells it more by `Told`, and a process is told by its environment:

    STUB_DIES_AT     the number of the request for completions at which it dies
    STUB_ONCE        a file that it leaves then, beside which it does not die again
    STUB_BROKEN      it does not even come up
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

FACTS = {
    "device": "cpu",
    "dtype": "float32",
    "context": 64,
    "logprobs_mode": "processed_logprobs",
    "sequences": 256,
    "chunked_prefill": False,
    "block": 4,
}
Reply = tuple[int, Any]


@dataclass
class Told:
    """What a stub does, and what it was asked."""

    facts: dict[str, Any] = field(default_factory=lambda: dict(FACTS))
    logprob: Callable[[Told], float] = lambda told: 0.0
    by: Callable[[int, dict[str, Any]], Reply | None] = lambda number, body: None
    """Another answer to the request for completions with this number."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    healthy: bool = True
    version: str = "default"
    generated: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, body: Any) -> Reply:
        with self.lock:
            self.asked.append((path, body))
            number = self.generated
            self.generated += path.startswith("/inference")
        if path == "/collective_rpc":
            return self._rpc(body)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path.startswith("/inference"):
            return self.by(number, body) or (200, self._completions(body))
        return 200, {"success": True}

    def _rpc(self, body: Any) -> Reply:
        if body["method"] == "groupwise_facts":
            return (200, {"results": [self.facts]}) if self.facts else (500, {"error": "no attribute groupwise_facts"})
        if not Path(body["args"][0]).is_file():
            return 500, {"error": "No such file"}
        return 200, {"results": [None]}

    def _completions(self, body: Any) -> dict[str, Any]:
        asked = body["sampling_params"]
        choices = []
        for index in range(asked["n"]):
            tokens = [(asked["seed"] + index + i) % 90 + 2 for i in range(asked["max_tokens"])]
            content = [{"logprob": self.logprob(self)} for _ in tokens]
            span = {"version": self.version, "start": 0, "end": len(tokens)}
            choice = {"index": index, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "length"}
            choices.append({**choice, "weight_versions": [span]})
        return {"choices": choices[::-1]}  # in no particular order


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "somebody"

    def do_GET(self) -> None:
        self._say(200 if self.server.told.healthy else 503, None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._say(*self.server.told.reply(self.path, json.loads(content) if content else None))

    def _say(self, status: int, answer: Any) -> None:
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Stub(socketserver.ThreadingMixIn):
    daemon_threads = True
    told: Told

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone: nothing to say."""


class OnSocket(Stub, socketserver.UnixStreamServer):
    pass


class OnPort(Stub, socketserver.TCPServer):
    allow_reuse_address = True


@contextlib.contextmanager
def serve(told: Told) -> Generator[str]:
    """The URL of a stub."""
    with OnPort(("127.0.0.1", 0), Handler) as server:
        server.told = told
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def interpreter(path: Path, **environment: Any) -> str:
    """A program that starts a stub where a server is asked of it, and is Python else."""
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    python = f"{sys.executable} -P"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {python} -c pass; fi\nexec env {variables} {python} {__file__} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def main() -> None:
    if os.environ.get("STUB_BROKEN"):
        print("ValueError: no room for keys and values", file=sys.stderr)
        sys.exit(0)
    dies_at = int(os.environ.get("STUB_DIES_AT", "-1"))
    mark = os.environ.get("STUB_ONCE")

    def dying(number: int, body: dict[str, Any]) -> None:
        if number == dies_at and not (mark and Path(mark).exists()):
            if mark:
                Path(mark).touch()
            os._exit(0)  # as vLLM's server does when its engine is lost

    print(f"stub {os.getpid()}", file=sys.stderr, flush=True)
    with OnSocket(sys.argv[sys.argv.index("--uds") + 1], Handler) as server:
        server.told = Told(by=dying)
        server.serve_forever()


if __name__ == "__main__":
    main()
