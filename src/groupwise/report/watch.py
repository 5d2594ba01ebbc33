"""`groupwise watch`: the page of a run, served live to a browser.  It reads the run folder and writes nothing.

/            the page
/data.json   everything but the completions in full; 304 while nothing has changed
/step.json   the groups of one step, as the page asks for them: ?run=0&step=12
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from groupwise.errors import ConfigError
from groupwise.report import page
from groupwise.report.completions import whole_groups
from groupwise.report.data import RunFolder, overview


class Server(ThreadingHTTPServer):
    """Serves the page of some runs until it is shut down.

    On a loopback address it answers whoever calls it by such a name; elsewhere only with `token` in the address.

    Raises:
        CheckpointError: a folder is no run.
        ConfigError: the address cannot be bound.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = [RunFolder(run) for run in runs]
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(18)
        self._reading = threading.Lock()
        self._known: tuple[str, bytes] = "", b""
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot be listened on: {error.strerror or error}; choose another port, "
                "or 0 for any that is free"
            ) from error

    @property
    def address(self) -> str:
        """What to open in a browser."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{host}:{port}/" + (f"?token={self.token}" if self.token else "")

    def state(self) -> str:
        """Another text whenever one of the runs has written something."""
        return "/".join(run.state() for run in self.runs)

    def data(self) -> bytes:
        """The runs as JSON; made anew only when one of them has changed."""
        with self._reading:
            state = self.state()
            if self._known[0] != state:
                self._known = state, json.dumps(self._data(), allow_nan=False).encode()
            return self._known[1]

    def html(self) -> bytes:
        """The page as it is now."""
        return page(json.loads(self.data())).encode()

    def step(self, run: int, step: int) -> bytes:
        """All groups of a step as JSON.

        Raises:
            LookupError: there is no such run, or no such step of it.
        """
        files = self.runs[run].files()
        return json.dumps(whole_groups({step: files[step]}, {step: None}), allow_nan=False).encode()

    def _data(self) -> dict[str, Any]:
        empty = [{"pieces": [], "steps": {}} for _ in self.runs]
        return {"live": True, "runs": [overview(run) for run in self.runs], "groups": empty}


class Handler(BaseHTTPRequestHandler):
    """Answers GET, and nothing else."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        if not self._may_read(query.get("token", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"the address that groupwise watch printed has a token", "text/plain")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, self.server.html(), "text/html")
        elif asked.path == "/data.json":
            tag = f'"{self.server.state()}"'
            changed = self.headers.get("If-None-Match") != tag
            status = HTTPStatus.OK if changed else HTTPStatus.NOT_MODIFIED
            self._answer(status, self.server.data() if changed else b"", "application/json", tag)
        elif asked.path == "/step.json":
            self._step(query)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"no such page", "text/plain")

    def _step(self, query: dict[str, str]) -> None:
        try:
            content = self.server.step(int(query["run"]), int(query["step"]))
        except (LookupError, ValueError, FileNotFoundError):
            self._answer(HTTPStatus.NOT_FOUND, b"no such step", "text/plain")
        else:
            self._answer(HTTPStatus.OK, content, "application/json")

    def _may_read(self, token: str) -> bool:
        """Whether the request has the token; on loopback, whether it was sent to a loopback name.

        A page elsewhere can point a name of its own at this machine; the browser then says that name as the host.
        """
        if self.server.token:
            return hmac.compare_digest(token.encode(), self.server.token.encode())
        return _is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each poll would push the address off the terminal."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
