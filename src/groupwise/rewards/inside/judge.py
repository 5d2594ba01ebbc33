"""The judge's end of the socket: the tests, which reach the program only through `Remote`s."""

from __future__ import annotations

import builtins
import os
import sys
import types

from groupwise.rewards.inside.wire import Gone, Peer, Remote, call

TYPE_CHECKING = False  # typing and collections would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

TESTS = "tests"
"""What the tests are called as a module."""


def play(orders: dict[str, Any]) -> None:
    """Run the tests and write `passed 101` (one digit a test) or `broken WHY` where the parent reads."""
    verdict_to = os.dup(1)
    os.dup2(2, 1)  # what tests print is not the verdict
    # The program may call a function that a test gives it, and do nothing else with our objects.
    peer = Peer(orders["socket"], {"call": call}, trusts=False)
    namespace: dict[str, Any] = {"__name__": TESTS, "__builtins__": builtins}
    try:
        peer.receive()  # the program is loaded
        program = Remote(peer, 0)
        sys.modules["solution"] = types.ModuleType("solution")
        sys.modules["solution"].__dict__["__getattr__"] = program.__getattr__
        for name in orders["names"]:
            try:
                namespace[name] = getattr(program, name)
            except AttributeError:
                continue  # whoever uses it will say NameError
        peer.asked = 0
        verdict = "passed " + "".join("01"[passed] for passed in _outcomes(orders, namespace, peer))
    except Gone:
        verdict = "passed 0"
    except BrokenTestsError as broken:
        verdict = f"broken {broken}"
    os.write(verdict_to, verdict.encode("utf-8", "replace"))
    os._exit(0)


class BrokenTestsError(Exception):
    """The tests themselves are at fault."""


def _outcomes(orders: dict[str, Any], namespace: dict[str, Any], peer: Peer) -> list[bool]:
    """Whether each test passed; a step that is no test and fails, fails all that would have followed it."""
    passed: list[bool] = []
    for is_test, code in orders["steps"]:
        done = _passes(lambda code=code: exec(code, namespace), orders, namespace, peer)
        if is_test:
            passed.append(done)
        elif not done:
            return [*passed, False]
    passed += [_passes(test, orders, namespace, peer) for test in _collected(namespace)]
    if not passed:
        raise BrokenTestsError("they hold no test: no assert, no function test_..., no unittest.TestCase")
    return passed


def _collected(namespace: dict[str, Any]) -> list[Callable[[], Any]]:
    """The functions `test...` and the methods of unittest classes that the tests have defined."""
    found: list[Callable[[], Any]] = []
    for name, value in list(namespace.items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            found.append(value)
        unittest = sys.modules.get("unittest")
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == TESTS:
            names = unittest.defaultTestLoader.getTestCaseNames(value)
            found += [lambda case=value, method=method: _run_method(case, method) for method in names]
    return found


def _run_method(case: Any, method: str) -> None:
    case.setUpClass()
    case(method).debug()  # set-up, test and tear-down; unlike run(), it raises
    case.tearDownClass()


def _passes(test: Callable[[], Any], orders: dict[str, Any], namespace: dict[str, Any], peer: Peer) -> bool:
    try:
        test()
    except Gone:
        return False
    except BaseException as error:
        if not getattr(error, "by_program", False):
            _blame(error, orders["names"], namespace, peer)
        return False
    return True


def _blame(error: BaseException, names: Sequence[str], namespace: dict[str, Any], peer: Peer) -> None:
    """Raise `BrokenTestsError` when a test has failed for a reason that cannot lie in the program."""
    missing = isinstance(error, ImportError) and error.name != "solution"
    used = peer.asked > 0 or any(type(namespace.get(name)) is not Remote for name in names)
    if missing or not used:
        why = "" if missing else " before they had used the program"
        raise BrokenTestsError(f"they raised {type(error).__name__}: {error}{why}")
