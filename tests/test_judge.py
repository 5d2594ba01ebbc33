"""A judge is asked patiently, not too much at a time, and once; an answer that is no score is never made into one."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from toys import metrics, toy_config, toy_folder, toy_rows

from groupwise.errors import ConfigError, RewardError
from groupwise.records import Rollout
from groupwise.rewards import Judge, ScoreField, ScorePattern, as_rewards, check_rewards, endpoint, score
from groupwise.train import train

PROMPT = "Question: {{ prompt }}\nAnswer: {{ completion }}\nRight answer: {{ answer }}\nEnd with `Score: N`, 0 to 10."


@dataclass(frozen=True)
class Reply:
    """What the stub server does with one request."""

    text: str = "Score: 7"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    body: bytes | None = None


class Stub(ThreadingHTTPServer):
    """An endpoint that replies as it is told, and counts."""

    daemon_threads = True

    def __init__(self, reply: Callable[[int, dict[str, Any]], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.lock = reply, threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.heard: list[dict[str, str]] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.server
        with stub.lock:
            number = len(stub.requests)
            stub.requests.append(request)
            stub.heard.append({"path": self.path, **self.headers})
            stub.times.append(time.monotonic())
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
        reply = stub.reply(number, request)
        time.sleep(reply.seconds)
        with stub.lock:
            stub.at_once -= 1
        message = {"choices": [{"message": {"role": "assistant", "content": reply.text}}]}
        body = json.dumps(message).encode() if reply.body is None else reply.body
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Stub]]:
    """Starts a stub that gives these replies in turn, the last one for ever; or what a function says."""
    stubs: list[Stub] = []

    def start(*replies: Reply, by: Callable[[int, dict[str, Any]], Reply] | None = None) -> Stub:
        stub = Stub(by or (lambda number, _: replies[min(number, len(replies) - 1)]))
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        stubs.append(stub)
        return stub

    yield start
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_SECONDS", 0.02)


def judge(url: str, **settings: Any) -> Judge:
    return Judge(url=url, model="judge-1", prompt=PROMPT, **settings)


def said(text: str, **row: Any) -> Rollout:
    return Rollout(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.arange(4) >= 2,
        logprobs=np.zeros(4, dtype=np.float32),
        group=0,
        text=text,
        example={"prompt": "2+2?", "answer": "4", **row},
    )


def scored(reward: Judge, *texts: str) -> list[Rollout]:
    return score([said(text) for text in texts], as_rewards([reward]), lambda row: row["prompt"])


def check(reward: Judge, **options: Any) -> None:
    rewards = as_rewards([{"use": reward, **options}])
    check_rewards(rewards, [{"prompt": "2+2?", "answer": "4"}], lambda row: row["prompt"])


def echo(number: int, request: dict[str, Any]) -> Reply:
    """The score that the completion asks for."""
    return Reply(request["messages"][0]["content"].split("Answer: ")[1].split("\n")[0])


# ----------------------------------------------------------------------------------------------------- question, answer


def test_the_question_is_the_template_filled_in_and_the_score_is_the_reward(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply("It is right.\nScore: 9"))
    (rollout,) = scored(judge(stub.url, request={"temperature": 0.0, "max_tokens": 64}), "4, I think.")
    assert rollout.reward == 9.0
    (request,) = stub.requests
    question = "Question: 2+2?\nAnswer: 4, I think.\nRight answer: 4\nEnd with `Score: N`, 0 to 10."
    messages = [{"role": "user", "content": question}]
    assert request == {"model": "judge-1", "messages": messages, "temperature": 0.0, "max_tokens": 64}
    assert stub.heard[0]["path"] == "/v1/chat/completions"
    assert "Authorization" not in stub.heard[0]


def test_a_prompt_of_messages_is_shown_as_what_was_said(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    for prompt in (messages, messages[1:]):
        score([said("4")], as_rewards([judge(stub.url)]), lambda row, prompt=prompt: prompt)
    questions = [request["messages"][0]["content"] for request in stub.requests]
    assert questions[0].startswith("Question: system: Be brief.\n\nuser: 2+2?\nAnswer: 4")
    assert questions[1].startswith("Question: 2+2?\nAnswer: 4")


@pytest.mark.parametrize(
    ("finder", "answer", "expected"),
    [
        (ScorePattern(), "Score: 7", 7),
        (ScorePattern(), "**Score:** 7.5/10", 7.5),
        (ScorePattern(), "score = -2", -2),
        (ScorePattern(), "Score: 3? No. Score: 8", 8),
        (ScorePattern(), "I would say 7", None),
        (ScorePattern(pattern=r"\[\[(\d+)\]\]"), "[[5]]", 5),
        (ScorePattern(pattern=r"\[\[(.+)\]\]"), "[[five]]", None),
        (ScoreField(), '{"score": 7}', 7),
        (ScoreField(), 'Well.\n```json\n{"why": "{", "score": "6.5"}\n```', 6.5),
        (ScoreField(), '{"score": 1} {"score": 2}', 2),
        (ScoreField(field="mark"), '{"result": {"mark": 3}}', 3),
        (ScoreField(), '{"score": true}', None),
        (ScoreField(), '{"score": 7', None),
        (ScoreField(), "7", None),
    ],
)
def test_a_score_is_found_or_it_is_not(finder: Any, answer: str, expected: float | None) -> None:
    assert finder(answer) == expected


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply("No comment."), "its answer has no score: ...'No comment.'"),
        (Reply("Score: 100"), "its answer has the score 100, not from 0 to 10"),
        (Reply("Score: -1"), "its answer has the score -1, not from 0 to 10"),
        (Reply("<think>Score: 9, maybe</think>I won't say."), "its answer has no score"),
        (Reply(body=b"<html>hello</html>"), "answered without a message: '<html>hello</html>'"),
        (Reply(body=b'{"choices": []}'), "answered without a message"),
        (Reply(""), "answered without a message"),
        (Reply(status=400, body=b"too long"), "/v1/chat/completions: 400: too long"),
    ],
)
def test_an_answer_without_a_score_makes_its_rollout_not_valid_and_no_other(
    serve: Callable[..., Stub], reply: Reply, problem: str
) -> None:
    stub = serve(by=lambda _, request: reply if "Answer: bad" in request["messages"][0]["content"] else Reply())
    good, bad = scored(judge(stub.url), "good", "bad")
    assert good.reward == 7.0
    assert not bad.valid
    assert math.isnan(bad.reward)
    assert bad.problem.startswith("rewards.judge: ")
    assert problem in bad.problem
    assert len(stub.requests) == 2, "to ask again would not help"


def test_a_completion_cannot_run_code_in_the_template(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply())
    scored(judge(stub.url), "{{ answer }} {% for %} {{ ''.__class__ }}")
    assert "Answer: {{ answer }} {% for %} {{ ''.__class__ }}\n" in stub.requests[0]["messages"][0]["content"]


# ------------------------------------------------------------------------------------------------------------- patience


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(status=429, body=b"busy"),
        Reply(status=500, body=b"oops"),
        Reply(status=503),
        Reply(seconds=0.6),
        Reply(body=b"short", headers={"Content-Length": "99"}),
    ],
)
def test_trouble_that_may_pass_is_waited_out(serve: Callable[..., Stub], trouble: Reply) -> None:
    stub = serve(trouble, trouble, Reply("Score: 5"))
    (rollout,) = scored(judge(stub.url, timeout_seconds=0.3), "4")
    assert rollout.reward == 5.0
    assert len(stub.requests) == 3


def test_waits_double_and_are_never_shorter_than_the_server_asks(serve: Callable[..., Stub]) -> None:
    wait = {"Retry-After": "0.3"}
    stub = serve(*[Reply(status=500)] * 3, Reply(status=429, headers=wait), Reply())
    scored(judge(stub.url), "4")
    waits = np.diff(stub.times)
    for attempt, waited in enumerate(waits[:3]):
        assert 0.5 * 0.02 * 2**attempt <= waited
    assert waits[3] >= 0.3


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3), ("0.5", 0.5), ("", 0), ("soon", 0), ("-1", 0), (formatdate(0, usegmt=True), 0)]
)
def test_the_header_says_seconds_or_a_date(header: str, seconds: float) -> None:
    assert endpoint._retry_after(header) == seconds
    ahead = endpoint._retry_after(formatdate(time.time() + 100, usegmt=True))
    assert 90 < ahead <= 100


def test_a_server_that_wants_to_be_left_alone_for_an_hour_is_given_up(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply(status=429, headers={"Retry-After": "3600"}, body=b"quota"))
    (rollout,) = scored(judge(stub.url), "4")
    assert "429: quota (attempt 1)" in rollout.problem


def test_what_never_works_is_recorded_with_its_cause(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply(status=500, body=b"out of order"))
    (rollout,) = scored(judge(stub.url, retries=2), "4")
    assert rollout.problem.endswith("/v1/chat/completions: 500: out of order (attempt 3)")
    assert len(stub.requests) == 3


def test_a_server_that_is_away_costs_the_patience_of_one_request(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply(status=503))
    rollouts = scored(judge(stub.url, concurrency=2, retries=1), *map(str, range(40)))
    assert not any(rollout.valid for rollout in rollouts)
    assert sum("not asked: " in rollout.problem for rollout in rollouts) > 30
    assert len(stub.requests) < 20


def test_no_more_requests_than_allowed_are_under_way(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply(seconds=0.05))
    began = time.monotonic()
    rollouts = scored(judge(stub.url, concurrency=4), *map(str, range(16)))
    assert all(rollout.valid for rollout in rollouts)
    assert stub.most_at_once == 4
    assert 4 * 0.05 <= time.monotonic() - began < 16 * 0.05 + 1


def test_each_rollout_gets_the_score_of_its_own_completion(serve: Callable[..., Stub]) -> None:
    stub = serve(by=echo)
    texts = [f"Score: {number % 11}" for number in range(30)]
    assert [rollout.reward for rollout in scored(judge(stub.url), *texts)] == [number % 11 for number in range(30)]
    assert len(stub.requests) == 11, "equal completions are one question"


def test_it_works_where_a_loop_runs_already(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply())

    async def in_a_notebook() -> float:
        return scored(judge(stub.url), "4")[0].reward

    assert asyncio.run(in_a_notebook()) == 7.0


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_same_question_is_asked_once_in_a_run(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply())
    reward = judge(stub.url)
    for _ in range(2):
        assert [rollout.reward for rollout in scored(reward, "4", "4", "5")] == [7.0, 7.0, 7.0]
    assert len(stub.requests) == 2


def test_an_answer_without_a_score_is_asked_for_again(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply("Hm."), Reply())
    reward = judge(stub.url)
    assert [scored(reward, "4")[0].valid for _ in range(2)] == [False, True]


def test_a_folder_keeps_the_answers_for_later_runs(serve: Callable[..., Stub], tmp_path: Path) -> None:
    stub = serve(Reply("Score: 6"))
    cache = str(tmp_path / "cache")
    assert scored(judge(stub.url, cache=cache), "4")[0].reward == 6.0
    assert scored(judge(stub.url, cache=cache), "4")[0].reward == 6.0
    assert len(stub.requests) == 1
    # What was kept is the answer: another way to read it needs no new one.
    other = judge(stub.url, cache=cache, score=ScorePattern(pattern=r"(\d)"), highest=6.5)
    assert scored(other, "4")[0].reward == 6.0
    assert len(stub.requests) == 1
    scored(judge(stub.url, cache=cache, request={"temperature": 1.0}), "4")
    assert len(stub.requests) == 2, "another request is another question"
    (file, _) = sorted((tmp_path / "cache").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    file.write_text("half of a")
    with pytest.raises(RewardError, match=rf"cache {file} is damaged: .*; delete this file"):
        scored(judge(stub.url, cache=cache), "4")


# ------------------------------------------------------------------------------------------------------- before the run


def test_the_api_key_comes_from_the_environment_and_stands_in_no_file(
    serve: Callable[..., Stub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = serve(Reply())
    reward = judge(stub.url, key_variable="JUDGE_KEY")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(RewardError, match=r"the environment has no JUDGE_KEY; export the API key"):
        check(reward, trial=False)
    monkeypatch.setenv("JUDGE_KEY", "secret-123")
    check(reward)
    assert stub.heard[0]["Authorization"] == "Bearer secret-123"
    assert "secret-123" not in toy_config(tmp_path, rewards=[reward]).to_yaml()


def test_an_endpoint_that_is_not_there_is_said_before_sampling(serve: Callable[..., Stub]) -> None:
    stub = serve(Reply())
    stub.server_close()
    said = r"chat/completions: ConnectError: .* \(attempt 2\) when tried on rows\[0\]"
    with pytest.raises(RewardError, match=said):
        check(judge(stub.url, retries=1))


def test_a_column_that_the_prompt_shows_must_be_there(serve: Callable[..., Stub]) -> None:
    reward = judge(serve(Reply()).url)
    assert reward.columns == ("answer",)
    with pytest.raises(RewardError, match=r"rewards\.judge: needs the column 'answer', which no row has"):
        check_rewards(as_rewards([reward]), [{"prompt": "2+2?"}], lambda row: row["prompt"])


def test_a_template_that_fails_on_a_row_makes_its_rollout_not_valid(serve: Callable[..., Stub]) -> None:
    reward = Judge(url=serve(Reply()).url, model="m", prompt="{{ completion }} {{ answer / 2 }}")
    (rollout,) = score([said("4")], as_rewards([reward]), lambda row: row["prompt"])
    assert "its prompt cannot be made of this row: TypeError" in rollout.problem


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "{{ completion"}, "prompt is not a Jinja template"),
        ({"prompt": "Rate it."}, "prompt does not show the completion; write {{ completion }}"),
        ({"url": "localhost:8000"}, "url"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest: 1.0 is not below highest: 1.0"),
        ({"score": {"type": "regex", "pattern": r"\d+"}}, "has no group for the score"),
        ({"score": {"type": "regex", "pattern": "("}}, "is not a regular expression"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"type": "judge", "url": "http://localhost:1/v1", "model": "m", "prompt": "{{ completion }}", **settings}
    with pytest.raises((ConfigError, ValidationError)) as error:
        toy_config(tmp_path, rewards=[given])
    assert message in str(error.value)


# ---------------------------------------------------------------------------------------------------------- in training


def test_a_policy_is_trained_with_a_judge_that_may_pass(serve: Callable[..., Stub], tmp_path: Path) -> None:
    def by(number: int, request: dict[str, Any]) -> Reply:
        words = request["messages"][0]["content"].split("Answer: ")[1].split("\n")[0].split()
        first = int("".join(filter(str.isdigit, words[0]))) if words else 0
        return Reply("I pass." if first % 7 == 0 else f"Score: {first % 10}")

    toy_folder(tmp_path / "model")
    toy_rows(tmp_path / "rows.jsonl")
    stub = serve(by=by)
    reward = {"type": "judge", "url": stub.url, "model": "m", "prompt": PROMPT}
    config = toy_config(tmp_path, rewards=[reward], steps=2, max_invalid_fraction=1.0, output=str(tmp_path / "run"))
    records = metrics(train(config).folder)
    assert [record["grad_norm"] > 0 for record in records] == [True, True]
    assert all(0 < record["invalid"] < 1 for record in records)
    assert all(0 < record["reward/judge"] < 10 for record in records)
