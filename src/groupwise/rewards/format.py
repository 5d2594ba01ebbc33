r"""A reward for the form of a completion, whatever it says."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from groupwise.records import Rollout
from groupwise.rewards.answers import boxed, final_part
from groupwise.slots import Slot

_THOUGHT = re.compile(r"\s*<think>.*\S.*</think>", re.DOTALL)


class Format(Slot):
    r"""`<think>...</think>`, then one answer in `\boxed{...}`: half a point each, or all or nothing when strict.

    The thinking opens the completion, is not empty, and each tag stands there once.  The box follows the thinking (or
    stands anywhere when there is none), is not empty, and is the only one there.
    """

    in_process: ClassVar[bool] = True
    type: Literal["format"] = "format"
    strict: bool = False
    """1 for both, else 0."""

    def __call__(self, rollout: Rollout) -> float:
        text = rollout.text
        part = final_part(text)
        thought = bool(_THOUGHT.match(text)) and text.count("<think>") == text.count("</think>") == 1
        answered = part.count("\\boxed") == 1 and bool((boxed(part) or "").strip())
        return float(thought and answered) if self.strict else (thought + answered) / 2
