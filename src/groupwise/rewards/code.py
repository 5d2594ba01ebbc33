"""The reward for programs: run the completion's code in a sandbox, and judge it where it cannot reach."""

from __future__ import annotations

import re
import socket
import textwrap
from typing import ClassVar, Literal

from groupwise.records import Rollout
from groupwise.rewards.answers import final_part
from groupwise.rewards.bubblewrap import SandboxError
from groupwise.rewards.sandbox import How, Limits, require, run, running
from groupwise.rewards.suites import Case, Suite, read_tests
from groupwise.slots import Slot

_BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


class Code(Slot):
    r"""1 when the last ```` ```python ```` block after the thinking passes the tests of its row.

    The tests are assert statements, unit tests, or cases of input and output (`rewards/suites.py` has the forms).
    Expected values never enter the program's sandbox: printed output is compared here, and asserts run in a sandbox
    of their own, which calls the program's functions from outside.  A program that fails, crashes or hits a limit
    earns 0.

    Raises:
        RewardError: there is no sandbox.
        ValueError: the row's tests are broken; the rollout is then not valid, for no program could pass.
        SandboxError: the sandbox has failed; so, too.
    """

    call_seconds: ClassVar[float] = 600.0  # each run has its own limit; this one is for many cases
    type: Literal["code"] = "code"
    column: str = "tests"
    """The column with the tests."""
    entry_point: str = ""
    """The column with the name of the function that the tests' `check(candidate)` is called with; empty: no such."""
    partial: bool = False
    """The share of tests that pass, rather than all or nothing."""
    limits: Limits = Limits()
    """What each run of a program may use."""
    sandbox: How = "bwrap"
    """`bwrap`, or `none`: plain subprocesses with limits, which can read and change whatever you can."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return (self.column, self.entry_point) if self.entry_point else (self.column,)

    def __call__(self, rollout: Rollout) -> float:
        require(self.sandbox, self.type)
        entry_point = str(rollout.example[self.entry_point]) if self.entry_point else ""
        tests = read_tests(rollout.example[self.column], entry_point)
        program = last_program(rollout.text)
        if program is None:
            return 0.0
        passed = self._suite(program, tests) if isinstance(tests, Suite) else self._cases(program, tests)
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    def _cases(self, program: str, cases: tuple[Case, ...]) -> list[bool]:
        """Whether the output of each case is right; without `partial`, the first wrong one is the last."""
        passed: list[bool] = []
        for case in cases:
            result = run(program, self.limits, self.sandbox, stdin=case.input.encode())
            passed.append(result.ok and _lines(result.stdout.decode("utf-8", "replace")) == _lines(case.output))
            if not passed[-1] and not self.partial:
                break
        return passed

    def _suite(self, program: str, suite: Suite) -> list[bool]:
        """Whether each test passes: two sandboxes, one for the program and one for its judge."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            orders = {"steps": suite.steps, "names": suite.names, "socket": ours.fileno()}
            serving = {"program": program, "socket": theirs.fileno()}
            with (
                running("serve", serving, self.limits, self.sandbox, sockets=[theirs.fileno()], listen=False) as server,
                running("judge", orders, self.limits, self.sandbox, sockets=[ours.fileno()]) as judge,
            ):
                # Only when nobody else holds an end does the death of one side reach the other.
                ours.close()
                theirs.close()
                result = judge.finish()
                if not server.confined:
                    raise SandboxError("the sandbox of the program was not set up")
        said, _, rest = result.stdout.decode("utf-8", "replace").partition(" ")
        if said == "broken":
            raise ValueError(f"the row's tests are broken: {rest}")
        if said == "passed" and re.fullmatch("[01]+", rest):
            return [digit == "1" for digit in rest]
        if result.limit:
            return [False]
        raise SandboxError(f"the judge ended with status {result.status}: {result.stderr.decode('utf-8', 'replace')}")


def last_program(text: str) -> str | None:
    """The content of the last ```` ```python ```` block after the thinking, or None."""
    blocks = _BLOCK.findall(final_part(text))
    return textwrap.dedent(blocks[-1]) if blocks else None


def _lines(output: str) -> list[str]:
    """Lines as they are compared: without spaces at their ends, and without empty lines at the end of all."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
