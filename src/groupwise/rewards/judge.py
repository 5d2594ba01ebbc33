"""A language model as the judge: a prompt about the completion, sent to an endpoint, and the score in its answer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, JsonValue, model_validator

from groupwise.chat import Prompt
from groupwise.errors import RewardError
from groupwise.records import Rollout
from groupwise.rewards.answers import final_part
from groupwise.rewards.calls import Verdict
from groupwise.rewards.endpoint import Answer, Endpoint
from groupwise.slots import OneOf, Slot

# A run file may come from somebody else.
_JINJA = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
OURS = {"prompt", "completion"}
Body = dict[str, Any]


class ScorePattern(Slot):
    """The number in group 1 of the last place where a regular expression matches."""

    type: Literal["regex"] = "regex"
    pattern: str = r"(?i)score[\s:=*\"']*(-?\d+(?:\.\d+)?)"
    """A Python regular expression with a group; the usual one finds `Score: 7`."""

    @model_validator(mode="after")
    def _has_a_group(self) -> ScorePattern:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        if not groups:
            raise ValueError(f"pattern {self.pattern!r} has no group for the score; add (...)")
        return self

    def __call__(self, answer: str) -> float | None:
        found = list(re.finditer(self.pattern, answer))
        return _number(found[-1][1]) if found else None


class ScoreField(Slot):
    """A field of the last JSON object in the answer that has it."""

    type: Literal["json"] = "json"
    field: str = "score"
    """Its name."""

    def __call__(self, answer: str) -> float | None:
        found = [_number(o[self.field]) for o in _objects(answer) if self.field in o]
        return found[-1] if found else None


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects in a text, each from its opening brace on; one inside another comes after it."""
    decoder = json.JSONDecoder()
    for brace in re.finditer(r"\{", text):
        try:
            yield decoder.raw_decode(text, brace.start())[0]
        except json.JSONDecodeError:
            continue


def _number(value: object) -> float | None:
    try:
        return None if isinstance(value, bool) else float(cast(Any, value))
    except (TypeError, ValueError):
        return None


class Judge(Slot):
    """The score that a language model gives the completion, by any OpenAI-compatible endpoint.

    An answer without a score, or with one out of bounds, makes the rollout not valid.  The same question is asked once.
    """

    type: Literal["judge"] = "judge"
    in_process: ClassVar[bool] = True
    url: str = Field(pattern=r"^https?://")
    """The endpoint's base, such as `http://localhost:8000/v1`."""
    model: str
    """The judge's name at that endpoint."""
    prompt: str
    """What it is asked: a Jinja template with `{{ completion }}`, and where wanted `{{ prompt }}` and columns."""
    score: Annotated[Callable[[str], float | None], OneOf(ScorePattern, ScoreField)] = ScorePattern()
    """Finds the score in the answer, after any thinking."""
    lowest: float = 0.0
    """A score below it is not trusted."""
    highest: float = 10.0
    """A score above it is not trusted."""
    request: dict[str, JsonValue] = Field(default={"temperature": 0.0})
    """What else the request says, such as `max_tokens`."""
    key_variable: str = ""
    """The environment variable that holds the API key; empty when none is needed."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests under way at a time."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one attempt."""
    retries: int = Field(default=4, ge=0)
    """Further attempts when the endpoint is busy, fails or cannot be reached."""
    cache: str | None = None
    """A folder that keeps the answers for later runs; null keeps scores only for this run."""

    @model_validator(mode="after")
    def _asks_about_the_completion(self) -> Judge:
        try:
            names = jinja2.meta.find_undeclared_variables(_JINJA.parse(self.prompt))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"prompt is not a Jinja template: {error}; write {{{{ completion }}}}") from error
        if "completion" not in names:
            raise ValueError("prompt does not show the completion; write {{ completion }} where it belongs")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest: {self.lowest} is not below highest: {self.highest}")
        return self

    @cached_property
    def _known(self) -> dict[str, float]:
        """The scores of this run, by question."""
        return {}

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a row."""
        return tuple(sorted(jinja2.meta.find_undeclared_variables(_JINJA.parse(self.prompt)) - OURS))

    def prepare(self, prompts: Mapping[int, Prompt]) -> None:
        """See `Together.prepare`.

        Raises:
            RewardError: the environment has no API key.
        """
        if self.key_variable and not os.environ.get(self.key_variable):
            raise RewardError(
                f"rewards: the judge {self.model}: the environment has no {self.key_variable}; export the API key "
                "under this name, or name another in key_variable"
            )

    def __call__(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Verdict]:
        asked = [self._question(rollout, prompt) for rollout, prompt in zip(rollouts, prompts, strict=True)]
        bodies = {_key(self.url, body): body for body in asked if isinstance(body, dict)}
        answers = self._answers({key: body for key, body in bodies.items() if key not in self._known})
        said = {key: self._verdict(key, answer) for key, answer in answers.items()}
        said |= {key: Verdict(self._known[key]) for key in bodies if key not in said}
        return [said[_key(self.url, body)] if isinstance(body, dict) else body for body in asked]

    def _answers(self, bodies: Mapping[str, Body]) -> dict[str, Answer]:
        kept = {key: answer for key in bodies if (answer := self._kept(key)) is not None}
        new = {key: body for key, body in bodies.items() if key not in kept}
        return kept | dict(zip(new, self._endpoint.ask(list(new.values())), strict=True))

    def _question(self, rollout: Rollout, prompt: Prompt) -> Body | Verdict:
        """The request about a rollout, or why there is none."""
        try:
            values = {**rollout.example, "prompt": _spoken(prompt), "completion": rollout.text}
            question = _JINJA.from_string(self.prompt).render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            return Verdict(math.nan, f"its prompt cannot be made of this row: {type(error).__name__}: {error}")
        return {"model": self.model, "messages": [{"role": "user", "content": question}], **self.request}

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(
            url=f"{self.url.rstrip('/')}/chat/completions",
            key=os.environ.get(self.key_variable, "") if self.key_variable else "",
            concurrency=self.concurrency,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
        )

    def _verdict(self, key: str, answer: Answer) -> Verdict:
        if answer.problem:
            return Verdict(math.nan, answer.problem)
        value = self.score(final_part(answer.text))
        if value is None:
            return Verdict(math.nan, f"its answer has no score: ...{answer.text[-200:]!r}")
        if not self.lowest <= value <= self.highest:
            return Verdict(
                math.nan, f"its answer has the score {value:g}, not from {self.lowest:g} to {self.highest:g}"
            )
        self._known[key] = value
        self._keep(key, answer)
        return Verdict(value)

    def _kept(self, key: str) -> Answer | None:
        """The answer of an earlier run.

        Raises:
            RewardError: its file is damaged.
        """
        file = Path(self.cache) / f"{key}.json" if self.cache else None
        if file is None or not file.is_file():
            return None
        try:
            return Answer(str(json.loads(file.read_text())["answer"]))
        except (ValueError, LookupError, TypeError) as error:
            raise RewardError(f"rewards: the judge's cache {file} is damaged: {error}; delete this file") from error

    def _keep(self, key: str, answer: Answer) -> None:
        if self.cache is None or (file := Path(self.cache) / f"{key}.json").is_file():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{key}.{os.getpid()}.partial")
        partial.write_text(json.dumps({"answer": answer.text}))
        os.replace(partial, file)


def _key(url: str, body: Body) -> str:
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


def _spoken(prompt: Prompt) -> str:
    """The prompt as text: what the user asked, with who said what when there are several messages."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
