"""The reference policy of a learner: a model of its own, or the policy itself with its adapter off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from transformers import PreTrainedModel

from groupwise.adapters import adapted, switched_off
from groupwise.errors import GroupwiseError

M = TypeVar("M")


class Reference(Generic[M]):
    """What a learner compares its policy with; `M` is how the learner runs a model."""

    def __init__(self, policy: M, model: PreTrainedModel, make: Callable[[], M] | None) -> None:
        """
        Args:
            policy: how the policy is run.
            model: the model that this runs; adapted, it is its own reference.
            make: makes the reference when it is first asked for; None where none was given.
        """
        self._policy, self._model, self._make = policy, model, make
        self._adapted = adapted(model)
        self._own: M | None = None
        self.moved = False
        """Whether it is another than at the start, so that checkpoints hold it."""

    @contextlib.contextmanager
    def running(self) -> Generator[M]:
        """How the reference is run, inside.

        Raises:
            GroupwiseError: there is none.
        """
        if self._adapted:
            with switched_off(self._model):
                yield self._policy
        else:
            yield self.own()

    def own(self) -> M:
        """The model of its own.

        Raises:
            GroupwiseError: there is none.
        """
        if self._own is None:
            if self._make is None:
                raise GroupwiseError("log-probabilities of the reference policy are needed, but no reference was given")
            self._own = self._make()
        return self._own

    def to_move(self) -> M:
        """The model of its own, to be overwritten with the policy as it is now.

        Raises:
            GroupwiseError: the policy is adapted, so that its base is the reference, or there is none.
        """
        if self._adapted:
            raise GroupwiseError("with LoRA the reference is the base model, which cannot move; train without lora")
        own, self.moved = self.own(), True
        return own
