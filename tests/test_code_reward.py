"""The reward for programs: which earn it, and that none earns it, or escapes its 0, by anything but being right."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import numpy as np
import pytest
from bwrap import NEEDS_BWRAP

from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards import Code, as_rewards, check_rewards, sandbox, score
from groupwise.rewards.code import last_program
from groupwise.rewards.sandbox import Limits
from groupwise.rewards.suites import Suite, read_tests

QUICK = Limits(cpu_seconds=1, wall_seconds=2)

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
SUM = "print(sum(map(int, input().split())))"


def rollout(program: str, tests: Any, **columns: Any) -> Rollout:
    return Rollout(
        tokens=np.zeros(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        group=0,
        text=f"<think>hm</think>Here:\n```python\n{textwrap.dedent(program)}\n```\nDone.",
        example={"tests": tests, **columns},
    )


def worth(program: str, tests: Any, reward: Code | None = None, **columns: Any) -> float:
    return (reward or Code(limits=QUICK))(rollout(program, tests, **columns))


# ------------------------------------------------------------------------------------------------ which block it takes


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nor\n```Python\nb\nc\n```", "b\nc\n"),
        ("<think>```python\na\n```</think>none", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```\na\n```", None),
        ("```bash\na\n```", None),
        ("```python\na", None),
        ("1. so:\n   ```python\n   a\n   ```", "a\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("", None),
    ],
)
def test_the_last_python_block_after_the_thinking_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text) == program


# ---------------------------------------------------------------------------------------------- tests that can be read


@pytest.mark.parametrize(
    "value",
    [
        CASES,
        {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]},
        json.dumps(CASES),
        json.dumps({"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}),
        [{"input": ["1 2"], "output": [3]}, {"input": "5 5", "output": 10}],
    ],
)
@NEEDS_BWRAP
def test_cases_of_input_and_output_come_in_many_layouts(value: Any) -> None:
    assert worth(SUM, value) == 1
    assert worth("print(3)", value) == 0
    assert worth("print(3)", value, Code(partial=True, limits=QUICK)) == 0.5


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("assert add(1", "not Python"),
        ("x = 1", "nothing of the program"),
        ("def check(candidate): assert candidate(1)", "entry_point"),
        (None, "neither code nor cases"),
        ([], "neither code nor cases"),
        ([{"in": 1}], "neither code nor cases"),
        ({"inputs": ["1"]}, "neither code nor cases"),
        ({"inputs": ["1"], "outputs": []}, "zip"),
        (3, "neither code nor cases"),
    ],
)
def test_tests_that_cannot_be_read_are_no_verdict(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_tests(value)


def test_what_the_tests_use_and_do_not_define_is_the_programs() -> None:
    code = "import os\nxs = [add(1)]\ndef helper(n): return other(n) + len(xs)\nassert helper(math.pi) == sub(xs)"
    suite = read_tests(code)
    assert isinstance(suite, Suite)
    assert suite.names == ("add", "other", "sub")
    assert [is_test for is_test, _ in suite.steps] == [False, False, False, False, True]


# ------------------------------------------------------------------------------------------------------ right and wrong


UNITTEST = """
import unittest
from solution import add

class TestAdd(unittest.TestCase):
    def setUp(self):
        self.one = 1
    def test_small(self):
        self.assertEqual(add(self.one, 2), 3)
    def test_texts(self):
        self.assertEqual(add("a", "b"), "ab")
    def test_refusal(self):
        with self.assertRaises(TypeError):
            add(1, "b")
"""
FUNCTIONS = "def test_a():\n    assert add(1, 2) == 3\n\ndef test_b():\n    assert add([1], [2]) == [1, 2]\n"
CHECK = "import random\n\ndef check(candidate):\n    for n in range(50):\n        assert candidate(n, 1) == n + 1\n"


@NEEDS_BWRAP
@pytest.mark.parametrize("tests", [TESTS, TESTS.splitlines(), UNITTEST, FUNCTIONS])
def test_right_programs_earn_and_wrong_ones_do_not(tests: Any) -> None:
    assert worth(ADD, tests) == 1
    assert worth("def add(a, b):\n    return a - b", tests) == 0
    assert worth("__name__ = 'x'\ndef sub(a, b):\n    return a - b", tests) == 0
    assert worth("def add(a, b:\n", tests) == 0
    assert worth("raise ValueError", tests) == 0


@NEEDS_BWRAP
def test_check_is_called_with_the_entry_point() -> None:
    reward = Code(entry_point="name", limits=QUICK)
    assert worth(ADD, CHECK, reward, name="add") == 1
    assert worth("def add(a, b): return 1", CHECK, reward, name="add") == 0
    with pytest.raises(ValueError, match="helper"):
        worth(ADD, "def check(candidate): assert helper(candidate(1, 2))", reward, name="add")


@NEEDS_BWRAP
def test_no_program_is_worth_nothing() -> None:
    empty = rollout("", TESTS)
    assert Code()(Rollout(empty.tokens, empty.loss_mask, empty.logprobs, 0, text="no", example=empty.example)) == 0


@NEEDS_BWRAP
def test_partial_credit_is_the_share_of_tests() -> None:
    half = Code(partial=True, limits=QUICK)
    assert worth("def add(a, b): return 3", TESTS, half) == 0.5
    assert worth("def add(a, b): return a + b if a < 2 else exit()", TESTS.splitlines(), half) == 0.5
    assert worth("def add(a, b): return 3", UNITTEST, half) == pytest.approx(1 / 3)
    assert worth("import os\ndef add(a, b): return 3 if a == 1 else os._exit(0)", TESTS, half) == 0.5


@NEEDS_BWRAP
def test_output_is_compared_without_spaces_at_line_ends() -> None:
    cases = [{"input": "", "output": "a b\n\nc"}]
    assert worth("print('a b  \\n\\nc\\n')", cases) == 1
    assert worth("print('a  b\\n\\nc')", cases) == 0
    assert worth("print('a b\\nc')", cases) == 0
    assert worth("print('a b\\n\\nc'); exit(1)", cases) == 0


# ---------------------------------------------------------------------------------- what goes between the two sandboxes


@NEEDS_BWRAP
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x", """
            import datetime, decimal, fractions, collections
            deque = collections.deque
            for value in (None, True, False, 0, -1, 10**9000, 0.1, float("inf"), 1j, "ü\\n\\udc80", b"\\0", [],
                          (1, [2]), {3}, frozenset([4]), {"a": {5: (6,)}}, range(3), fractions.Fraction(1, 3),
                          decimal.Decimal("1.50"), datetime.date(2020, 1, 2), datetime.timedelta(3), deque([1, 2], 3)):
                found = f(value)
                assert found == value and type(found) is type(value)
            assert f(float("nan")) != f(float("nan"))
        """),
        ("import collections\ndef f(x): return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): x.sort()", "xs = [3, 1]\nassert f(xs) is None\nassert xs == [1, 3]"),
        ("def f(x): x['k'] = {1}", "d = {'a': 1}\nf(d)\nassert d == {'a': 1, 'k': {1}}"),
        ("def f(g, x): return [g(y) for y in x]",
         "assert f(lambda y: y * y, [1, 2]) == [1, 4]\nassert f(len, ['a']) == [1]"),
        ("def f(n):\n  for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
        ("class Stack:\n  def __init__(s): s.all = []\n  def push(s, x): s.all.append(x)\n"
         "  def pop(s): return s.all.pop()\n  def __len__(s): return len(s.all)",
         "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and s.all == [1]"),
        ("class P:\n  def __init__(s, x): s.x = x\n  def __repr__(s): return f'P({s.x})'\ndef f(p): return p.x + 1",
         "p = P(3)\nassert f(p) == 4 and str(p) == 'P(3)'\np.x = 8\nassert f(p) == 9"),
        ("LIMIT = 7\ndef f(): return LIMIT", "assert f() == LIMIT == 7"),
        ("def f(x): raise KeyError(x)", "try:\n  f(1)\n  assert False\nexcept KeyError:\n  pass"),
        ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
        ("print('noise')\ndef f(): print('more'); return 1\nif __name__ == '__main__': input()", "assert f() == 1"),
    ],
)  # fmt: skip
def test_tests_find_in_the_program_what_they_would_beside_it(program: str, tests: str) -> None:
    assert worth(program, textwrap.dedent(tests)) == 1


# ------------------------------------------------------------------------------------------------------------- cheating

CHEATS = {
    "prints what the harness may print": "print('passed 11'); print('OK')\ndef add(a, b): print('passed 11')",
    "writes it to every file": """
        import os
        for fd in range(64):
            try: os.write(fd, b"passed 11")
            except OSError: pass
        def add(a, b): return 0
    """,
    "exits well": "exit(0)",
    "exits well when called": "def add(a, b): exit(0)",
    "ends at once": "import os\ndef add(a, b): os._exit(0)",
    "equals everything": """
        class Any(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = int.__hash__
            def __bool__(self): return True
            def __sub__(self, other): return 0
            __rsub__ = __radd__ = __add__ = __abs__ = __sub__
            def __lt__(self, other): return True
            __gt__ = __le__ = __ge__ = __contains__ = __lt__
        def add(a, b): return Any()
    """,
    "equals everything by its class": """
        class Meta(type):
            def __eq__(cls, other): return True
            __hash__ = type.__hash__
            def __instancecheck__(cls, other): return True
        class add(metaclass=Meta):
            def __new__(cls, a, b): return cls
    """,
    "replaces built-ins": """
        import builtins
        builtins.all = builtins.any = builtins.isinstance = builtins.bool = lambda *a, **k: True
        builtins.AssertionError = type("Quiet", (Exception,), {})
        builtins.__import__ = lambda *a, **k: None
        abs = lambda x: 0
        def add(a, b): return 0
    """,
    "brings its own math": "class math: isclose = staticmethod(lambda *a: True)\ndef add(a, b): return 0",
    "patches the harness": """
        import sys, gc, types
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
                if isinstance(value, types.FunctionType) and value.__module__.startswith("groupwise"):
                    setattr(module, name, lambda *a, **k: True)
        def add(a, b): return 0
    """,
    "looks for the expected value in every frame and object": """
        import gc, sys
        def add(a, b):
            frame, seen = sys._getframe(), []
            while frame:
                seen += [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
                frame = frame.f_back
            for thing in gc.get_objects():
                seen += thing.values() if type(thing) is dict else thing if type(thing) in (list, tuple) else ()
            expected = int("8128")
            return a + b if any(type(thing) is int and thing == expected for thing in seen) else 0
    """,
    "leaves work for the end": """
        import atexit, os, threading
        atexit.register(lambda: os.write(1, b"passed 11"))
        class Last:
            def __del__(self): os.write(1, b"passed 11")
        last = Last()
        threading.Thread(target=lambda: os.write(1, b"passed 11")).start()
        def add(a, b): return 0
    """,
    "raises what a judge may take for success": "def add(a, b): raise StopIteration(0)",
    "answers with a judge's built-in": "add = __import__",
    "speaks the protocol itself": """
        import os, struct
        for fd in range(3, 64):
            try: os.write(fd, struct.pack(">I", 2) + b"zz"); os.write(fd, b"\\xff" * 64)
            except OSError: pass
        def add(a, b): return 0
    """,
    "answers without end": """
        import os
        def add(a, b):
            for fd in range(3, 64):
                try:
                    while True: os.write(fd, b"\\0\\0\\0\\0" * 999)
                except OSError: pass
    """,
    "answers too much": "def add(a, b): return 'x' * (1 << 27)",
    "answers too deep": """
        def add(a, b):
            deep = []
            for _ in range(900): deep = [deep]
            return deep
    """,
    "never answers": "import time\ndef add(a, b): time.sleep(60)",
    "kills everyone": "import os\ndef add(a, b): os.kill(-1, 9)",
    "runs its judge's process": """
        import sys
        sys.settrace(lambda *a: None); sys.setrecursionlimit(10**6)
        def add(a, b): return add(a, b)
    """,
    "raises the error of a broken row": "def add(a, b): raise ImportError('no module named nothing')",
    "is a number": "add = 3",
    "is called something else": "__name__ = 'x'",
}


@NEEDS_BWRAP
@pytest.mark.parametrize("how", CHEATS)
def test_a_program_that_cheats_earns_nothing_and_is_not_excused(how: str) -> None:
    tests = "assert add(8000, 128) == 8128\nassert math.isclose(add(2, 2), 4)\nassert abs(add(2, 3) - 5) < 1e-6"
    tests += "\nassert 9 in [add(4, 5)]\nassert all(add(n, n) == 2 * n for n in (1, 2)) and isinstance(add(1, 1), int)"
    assert worth(CHEATS[how], tests, Code(partial=True, limits=QUICK)) == 0


@NEEDS_BWRAP
@pytest.mark.parametrize(
    "program",
    [
        "print('passed 11')",
        "exit(0)",
        "import os; os._exit(0)",
        "import sys\nframe = sys._getframe()\nwhile frame: print(frame.f_locals); frame = frame.f_back",
        "import glob; print(*[open(path).read() for path in glob.glob('/*') + glob.glob('/tmp/**')])",
        "while True: print(3)",
    ],
)
def test_a_program_that_reads_and_prints_cannot_know_what_is_expected(program: str) -> None:
    assert worth(program, CASES, Code(limits=QUICK, partial=True)) == 0


@NEEDS_BWRAP
def test_clearing_its_arguments_does_not_make_a_wrong_answer_right() -> None:
    tests = "xs = [3, 1, 2]\nassert ordered(xs) == sorted(xs)"
    assert worth("def ordered(xs): return sorted(xs)", tests) == 1
    assert worth("def ordered(xs):\n    xs.clear()\n    return xs", tests) == 0


# ------------------------------------------------------------------------------------------- rows and machines at fault


@NEEDS_BWRAP
@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("import no_such_module\nassert add(1, 2) == 3", "no_such_module"),
        ("x = 1 / 0\nassert add(1, 2) == 3", "division by zero"),
        ("value = add(1, 2)", "no test"),
    ],
)
def test_a_row_whose_tests_are_broken_is_not_valid(tests: str, why: str) -> None:
    (judged,) = score([rollout(ADD, tests)], as_rewards(Code(limits=QUICK)), lambda row: "?")
    assert not judged.valid
    assert "the row's tests are broken" in judged.problem
    assert why in judged.problem


@NEEDS_BWRAP
def test_a_sandbox_that_fails_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Code, "in_process", True, raising=False)  # a worker would not see the next patch
    reward = as_rewards(Code(limits=QUICK))
    check_rewards(reward, [{"tests": TESTS}], lambda row: "?")
    real = sandbox.start
    monkeypatch.setattr(sandbox, "start", lambda words, *more, **named: real(["/nothing"], *more, **named))
    for tests in (TESTS, CASES):
        (judged,) = score([rollout(ADD, tests)], reward, lambda row: "?")
        assert not judged.valid
        assert "SandboxError" in judged.problem


def test_without_a_sandbox_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._obstacle.cache_clear()
    monkeypatch.setattr(Code, "in_process", True, raising=False)  # a worker has a PATH of its own
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(RewardError, match=r"apt install bubblewrap.*sandbox: none"):
            check_rewards(as_rewards("code"), [{"tests": TESTS}], lambda row: "?")
    finally:
        sandbox._obstacle.cache_clear()


def test_without_a_sandbox_on_request() -> None:
    (reward,) = as_rewards({"type": "code", "sandbox": "none", "limits": {"cpu_seconds": 1.0, "wall_seconds": 5.0}})
    assert isinstance(reward.use, Code)
    assert worth(ADD, TESTS, reward.use) == 1
    assert worth("def add(a, b): return 3", TESTS, reward.use) == 0
    assert worth(SUM, CASES, reward.use) == 1
