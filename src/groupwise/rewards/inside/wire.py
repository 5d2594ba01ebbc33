"""Values and requests on the wire between a program and its judge: data by value, everything else by reference.

A value is a tag, the length of its content, and the content.  Nothing that arrives can be more than data: there is
no pickle, and a class outside the list of `REBUILT` ones stays at home.
"""

from __future__ import annotations

import builtins
import os

from groupwise.rewards.inside.confine import PROGRAM

TYPE_CHECKING = False  # typing and collections would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

LONGEST_MESSAGE = 1 << 24


class Gone(BaseException):
    """The other end has died or broken the protocol; no `except Exception` of a test may hide it."""


SCALARS: dict[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (lambda value: b"", lambda body: None),
    bool: (lambda value: b"1" if value else b"", bool),
    int: (lambda value: b"%x" % value, lambda body: int(body, 16)),  # decimal has a limit of 4,300 digits
    float: (lambda value: float.hex(value).encode(), lambda body: float.fromhex(body.decode())),
    str: (lambda value: value.encode("utf-8", "surrogatepass"), lambda body: body.decode("utf-8", "surrogatepass")),
    bytes: (bytes, bytes),
}
SERIES: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    list: (list, list),
    tuple: (tuple, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    complex: (lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    dict: (
        lambda value: [part for item in dict.items(value) for part in item],
        lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
}
DATA = [*SCALARS, *SERIES]
REBUILT = ("builtins.range", "collections.deque", "decimal.Decimal", "fractions.Fraction", "datetime.date",
           "datetime.datetime", "datetime.time", "datetime.timedelta")  # fmt: skip


class Peer:
    """One end of a conversation: it asks for things to be done with the other's objects, and does the same for it.

    `verbs` are what it does when asked.  The program's end `trusts` the judge, and takes its names of built-ins.
    """

    def __init__(self, fd: int, verbs: dict[str, Callable[..., Any]], *, trusts: bool) -> None:
        self.fd, self.verbs, self.trusts = fd, verbs, trusts
        self.shown: list[Any] = []  # our objects that the other end can name, by their place
        self.places: dict[int, int] = {}
        self.asked = 0

    def ask(self, verb: str, place: int, *operands: Any) -> Any:
        """What the other end answers, after doing whatever it asks meanwhile.

        Raises:
            Gone: there is no readable answer.
            Exception: what the other end raised, as the nearest built-in class, marked `by_program`.
        """
        self.asked += 1
        self.send("ask", verb, place, operands)
        while True:
            kind, *said = self.receive()
            if kind == "ask" and len(said) == 3:
                self.answer(*said)
            elif kind == "done" and len(said) == 1:
                return said[0]
            elif kind == "raised" and len(said) == 2:
                raise _exception(*said)
            else:
                raise Gone("an answer of an unknown kind")

    def answer(self, verb: str, place: int, operands: Sequence[Any]) -> None:
        """Do what the other end asks with the object at `place`, and tell what came of it."""
        try:
            self.send("done", self.verbs[verb](self.shown[place], *operands))
        except BaseException as error:  # SystemExit, too: the program may end itself only by dying
            if isinstance(error, Gone):
                raise
            self.send("raised", [kind.__name__ for kind in type(error).__mro__], str(error))

    def send(self, *message: Any) -> None:
        """Write one message, whole."""
        body = self.pack(message)
        data = memoryview(len(body).to_bytes(4, "big") + body)
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except OSError as error:
                raise Gone("the other end is gone") from error

    def receive(self) -> Any:
        """The next message: a tuple.

        Raises:
            Gone: there is none, or it cannot be read.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > LONGEST_MESSAGE:
            raise Gone(f"a message of {length} bytes")
        data = self._read(length)
        try:
            message, _ = self.unpack(data, 0)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
            raise Gone(f"an unreadable message: {error!r}") from error
        if type(message) is not tuple or not message:
            raise Gone("a message that is no tuple")
        return message

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                parts.append(os.read(self.fd, min(count, 1 << 16)))
            except OSError as error:
                raise Gone("the other end is gone") from error
            if not parts[-1]:
                raise Gone("the other end is gone")
            count -= len(parts[-1])
        return b"".join(parts)

    def pack(self, value: Any) -> bytes:
        """Tag, length, content: of the value when it is data, else of its place in `shown`."""
        if type(value) is Remote:
            return _framed(b"y", b"%x" % _place(value))
        # An instance of the program's own subclass of list is an object: its methods are what matters.
        kinds = DATA if type(value).__module__ != PROGRAM else []
        kind = next((kind for kind in kinds if isinstance(value, kind)), None)
        if kind in SCALARS:
            return _framed(b"%c" % (97 + DATA.index(kind)), SCALARS[kind][0](value))
        if kind in SERIES:
            parts = map(self.pack, SERIES[kind][0](value))
            return _framed(b"%c" % (97 + DATA.index(kind)), b"".join(parts))
        path = f"{type(value).__module__}.{type(value).__name__}"
        if path in REBUILT:
            _, arguments, *more = value.__reduce__()
            return _framed(b"z", self.pack((path, arguments, list(more[1]) if len(more) > 1 else [])))
        if not self.trusts and vars(builtins).get(getattr(value, "__name__", "")) is value:
            return _framed(b"w", value.__name__.encode())  # a key=len is worth no round trip
        if id(value) not in self.places:
            self.places[id(value)] = len(self.shown)
            self.shown.append(value)
        return _framed(b"x", b"%x" % self.places[id(value)])

    def unpack(self, data: bytes, at: int) -> tuple[Any, int]:
        """(the value that begins at `at`, where the next one begins)."""
        tag, start = data[at : at + 1], at + 5
        end = start + int.from_bytes(data[at + 1 : start], "big")
        if end > len(data):
            raise ValueError("a value that ends after its message")
        if tag == b"x":
            return Remote(self, int(data[start:end], 16)), end
        if tag == b"y":
            return self.shown[int(data[start:end], 16)], end
        if tag == b"w" and self.trusts:
            return vars(builtins)[data[start:end].decode()], end
        if tag == b"z":
            return _rebuilt(*self.unpack(data, start)[0]), end
        kind = DATA[ord(tag) - 97]
        if kind in SCALARS:
            return SCALARS[kind][1](data[start:end]), end
        parts: list[Any] = []
        while start < end:
            part, start = self.unpack(data, start)
            parts.append(part)
        return SERIES[kind][1](parts), end


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(4, "big") + body


def _rebuilt(path: str, arguments: tuple[Any, ...], items: list[Any]) -> Any:
    if path not in REBUILT:
        raise ValueError(f"an object of the class {path}")
    module, _, name = path.rpartition(".")
    value = getattr(__import__(module), name)(*arguments)
    if items:
        value.extend(items)
    return value


class ProgramError(Exception):
    """An exception of the program that has no built-in class below Exception, such as SystemExit."""


def _exception(names: Any, message: Any) -> Exception:
    """The exception of the nearest built-in class; UnicodeErrors want more than a message."""
    kinds = [vars(builtins).get(name) for name in names if type(name) is str] if type(names) is list else []
    classes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]
    error = next((kind for kind in classes if not issubclass(kind, UnicodeError)), ProgramError)(message)
    error.__dict__["by_program"] = True
    return error


def call(target: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """What the target returns, and the arguments as they are afterwards."""
    value = target(*arguments, **keywords)
    # By convention what works in place returns None, and only then do the judge's arguments change as ours did.
    return value, (arguments if value is None else None)


class Remote:
    """An object of the program as the judge sees it.

    It can be called, looked into, iterated and printed, and what comes back is data or again a `Remote`.  It has no
    arithmetic, no order, cannot be searched, and equals only itself: nothing that could decide a test is left to the
    program.
    """

    __slots__ = ("_at",)

    def __init__(self, peer: Peer, place: int) -> None:
        object.__setattr__(self, "_at", (peer, place))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value, after = _ask(self, "call", arguments, keywords)
        for ours, theirs in zip(arguments, after or (), strict=False):
            _overwrite(ours, theirs)
        return value

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __len__(self) -> int:
        return _ask(self, "len")

    def __bool__(self) -> bool:
        return _ask(self, "bool")

    def __str__(self) -> str:
        return _ask(self, "str")

    def __repr__(self) -> str:
        return _ask(self, "repr")

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    __contains__: None = None  # else `in` would try what the iterator offers, and it may offer everything

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and _place(self) == _place(other)

    def __hash__(self) -> int:
        return hash(_place(self))


def _place(remote: Remote) -> int:
    return object.__getattribute__(remote, "_at")[1]


def _ask(remote: Remote, verb: str, *operands: Any) -> Any:
    peer, place = object.__getattribute__(remote, "_at")
    return peer.ask(verb, place, *operands)


def _overwrite(ours: Any, theirs: Any) -> None:
    if type(ours) is not type(theirs):
        return
    if isinstance(ours, list):
        ours[:] = theirs
    elif isinstance(ours, dict | set):
        ours.clear()
        ours.update(theirs)
