"""`judge` and `reward_model` against servers that answer as the field's do, or badly, or not at all."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, completion_create_params
from pydantic import TypeAdapter

from gangline.domain.contracts import EvaluationContext, GraderEngine, Reward
from gangline.domain.errors import GraderUnavailable, InvalidRequest
from gangline.domain.ids import new_id
from gangline.grading.models.judge import cut_to_fit
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import Verdicts
from gangline.settings import plugins
from gangline.settings.node import NodeSettings
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context, a_trace, said

REQUEST = TypeAdapter(completion_create_params.CompletionCreateParamsNonStreaming)
Answer = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def served(answer: Answer) -> AsyncGenerator[tuple[str, list[tuple[web.Request, dict[str, Any]]]]]:
    """A server's URL, and the requests that it gets. `answer`: JSON, or a whole response, for a request's body."""
    got: list[tuple[web.Request, dict[str, Any]]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        got.append((request, body))
        said = answer(body)
        return said if isinstance(said, web.StreamResponse) else web.json_response(said)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


def completion(content: str | None) -> dict[str, Any]:
    """A reply as OpenAI's SDK types it."""
    return ChatCompletion.model_validate(
        {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": content},
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
        }
    ).model_dump()


def verdict(score: Any) -> dict[str, Any]:
    return completion(json.dumps({"reason": "because", "score": score}))


def context_of(tmp_path: Path, engine: GraderEngine | None = None, text: str = "I did it") -> EvaluationContext:
    runtime = FolderRuntime(tmp_path / new_id("runtime"))
    context = a_context(runtime, traces=(a_trace(said("assistant", text), prompt=(said("user", "do it"),)),))
    return msgspec.structs.replace(context, engines={} if engine is None else {"judge": engine})


async def graded(context: EvaluationContext, strategy: str = "judge", **config: Any) -> Reward:
    given = {"engine": "judge"} | ({"rubric": "Is it done?"} if strategy == "judge" else {}) | config
    return await plugins.make_evaluator(strategy, given).evaluate(context)


async def test_a_verdict_is_the_reward_with_its_calls_tokens_and_cost(tmp_path: Path) -> None:
    async with served(lambda _: verdict(7)) as (url, got):
        engine = GraderEngine(url=url + "/v1", model="m", prompt_price=2.0, completion_price=10.0)
        context = context_of(tmp_path, engine)
        result = await graded(context, reference="42")
    ((request, body),) = got
    REQUEST.validate_python(body)
    assert (request.path, body["model"], body["temperature"]) == ("/v1/chat/completions", "m", 0.0)
    assert all(part in body["messages"][1]["content"] for part in ("do it", "Is it done?", "I did it", "42"))
    assert result.reward == 0.7
    assert result.details == {
        "score": 7.0,
        "votes": [{"score": 7.0, "reason": "because"}],
        "num_cached": 0,
        "model": "m",
        "num_calls": 1,
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "cost": pytest.approx(0.003),
    }
    (call,) = json.loads(context.artifacts["judge.json"])["calls"]
    assert (call["request"], call["answer"]["choices"][0]["finish_reason"]) == (body, "stop")


@pytest.mark.parametrize(("combine", "reward"), [("mean", 0.4), ("median", 0.2), ("majority", 0.2)])
async def test_votes_are_combined(tmp_path: Path, combine: str, reward: float) -> None:
    async with served(lambda body: verdict([2, 2, 8][body["seed"]])) as (url, got):
        result = await graded(context_of(tmp_path, GraderEngine(url=url)), votes=3, combine=combine)
    assert (result.reward, {body["temperature"] for _, body in got}) == (reward, {1.0})


async def test_an_equal_question_is_asked_once(tmp_path: Path) -> None:
    async with served(lambda _: verdict(5)) as (url, got):
        verdicts = Verdicts()
        for text in ("a", "a", "b"):
            context = context_of(tmp_path, GraderEngine(url=url), text)
            result = await graded(msgspec.structs.replace(context, verdicts=verdicts))
            assert result.reward == 0.5
        assert len(got) == 2
        await graded(msgspec.structs.replace(context, verdicts=verdicts), cache=False)
    assert len(got) == 3


def test_the_cache_forgets_the_oldest() -> None:
    verdicts = Verdicts(max_bytes=10)
    verdicts[b"a"], verdicts[b"b"] = b"1234", b"1234"
    assert verdicts[b"a"] == b"1234"
    verdicts[b"c"] = b"1234"
    assert list(verdicts) == [b"a", b"c"]


NONSENSE: dict[str, Any] = {
    "prose": completion("It is great!"),
    "nothing": completion(None),
    "too much": verdict(11),
    "a boolean": verdict(True),
    "a text": verdict("9"),
    "no choices": {"choices": []},
    "a list": [1],
    "a number": 3,
    "half a brace": completion('{"score": '),
    "no JSON": web.Response(text="<html>"),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_judge_that_answers_nonsense_gives_no_reward(tmp_path: Path, name: str) -> None:
    def answer(_: dict[str, Any]) -> Any:
        given = NONSENSE[name]
        return web.Response(text=given.text) if isinstance(given, web.Response) else given

    async with served(answer) as (url, got):
        with pytest.raises(GraderUnavailable):
            await graded(context_of(tmp_path, GraderEngine(url=url)), tries=2)
    assert len(got) == 2


async def test_a_judge_that_comes_to_its_senses_is_heard(tmp_path: Path) -> None:
    said = [
        web.Response(status=503, headers={"Retry-After": "0"}),
        completion("hm"),
        completion('<think>{"score": 1}</think>```json\n{"score": 8}```'),
    ]
    async with served(lambda _: said.pop(0)) as (url, got):
        result = await graded(context_of(tmp_path, GraderEngine(url=url)))
    assert (result.reward, result.details["num_calls"], result.details["prompt_tokens"]) == (0.8, 2, 2000)
    assert len({body["seed"] for _, body in got}) == 2


async def test_a_judge_that_is_down_slow_or_refuses_gives_no_reward(tmp_path: Path) -> None:
    down = GraderEngine(url="http://127.0.0.1:9")
    with pytest.raises(GraderUnavailable, match="failed 2 times"):
        await graded(context_of(tmp_path, down), tries=2)
    async with served(lambda _: web.Response(status=401, text="no key")) as (url, got):
        with pytest.raises(GraderUnavailable, match="status 401: no key"):
            await graded(context_of(tmp_path, GraderEngine(url=url)))
        assert len(got) == 1
    with pytest.raises(GraderUnavailable, match="no grader engine 'judge'; known: none"):
        await graded(context_of(tmp_path))


async def test_a_judge_that_never_answers_ends_by_its_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(GraderUnavailable, match=r"no answer within 0\.2 s"):
            await graded(context_of(tmp_path, GraderEngine(url=url)), call_timeout_seconds=0.2, tries=2)


async def test_a_key_is_named_and_sent_but_never_written_down(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    async with served(lambda _: verdict(10)) as (url, got):
        context = context_of(tmp_path, GraderEngine(url=url, model="m", key_env="JUDGE_KEY"))
        result = await graded(context)
    assert got[0][0].headers["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in repr(result) + context.artifacts["judge.json"].decode()
    with pytest.raises(GraderUnavailable, match="'NO_SUCH_KEY' is not set"):
        await graded(context_of(tmp_path, GraderEngine(url=url, key_env="NO_SUCH_KEY")))


@pytest.mark.parametrize("strategy", ["judge", "reward_model"])
def test_a_task_cannot_have_a_variable_of_the_node_sent_somewhere(strategy: str) -> None:
    config = {"engine": {"url": "http://198.51.100.1", "model": "m", "key_env": "AWS_SECRET_ACCESS_KEY"}, "rubric": "x"}
    with pytest.raises(InvalidRequest, match=r"may not name a variable of the node's environment.*grader_engines"):
        plugins.make_evaluator(strategy, config)


async def test_long_work_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    async with served(lambda _: verdict(1)) as (url, got):
        context = context_of(tmp_path, GraderEngine(url=url), "begin" + "x" * 5000 + "end")
        await graded(context, max_chars=100)
    content = got[0][1]["messages"][1]["content"]
    assert all(part in content for part in ("begin", "[4908 characters left out]", "end\n"))


def of_parts(*scores: Any, **more: Any) -> dict[str, Any]:
    found = {str(number): {"score": score, "reason": f"r{number}"} for number, score in enumerate(scores, start=1)}
    return completion(json.dumps(found | more))


def traced(tmp_path: Path, engine: GraderEngine, *texts: str) -> EvaluationContext:
    context = context_of(tmp_path, engine)
    traces = tuple(
        a_trace(said("assistant", text), prompt=(said("user", "before"),), name=f"t{at}")
        for at, text in enumerate(texts)
    )
    return msgspec.structs.replace(context, trajectory=msgspec.structs.replace(context.trajectory, traces=traces))


RUBRIC: dict[str, Any] = {"reads": "traces", "lowest": -5, "highest": 5, "reward_at_lowest": -1}
"""Polar's `harbor_rubric`: the reward of a score is score / 5."""


async def test_one_call_scores_each_trace_and_the_session_has_their_mean(tmp_path: Path) -> None:
    async with served(lambda _: of_parts(5, -5, 0, 2)) as (url, got):
        context = traced(tmp_path, GraderEngine(url=url, model="m"), *"abcd")
        result = await graded(context, **RUBRIC)
    ((_, body),) = got
    REQUEST.validate_python(body)
    assert result.trace_rewards == pytest.approx({"t0": 1.0, "t1": -1.0, "t2": 0.0, "t3": 0.4})
    assert result.reward == pytest.approx(0.1)
    assert result.details["traces"]["t1"] == {"score": -5.0, "votes": [{"score": -5.0, "reason": "r2"}]}
    assert body["max_tokens"] == 1024 + 4 * 128
    schema = body["response_format"]["json_schema"]["schema"]
    assert (schema["required"], schema["additionalProperties"]) == (["1", "2", "3", "4"], False)
    assert "before" not in body["messages"][1]["content"], "each trace's prompt would repeat the ones before"


async def test_traces_of_other_models_are_shown_and_do_not_count_for_the_session(tmp_path: Path) -> None:
    async with served(lambda _: of_parts(10, 2)) as (url, _):
        context = traced(tmp_path, GraderEngine(url=url), "the adviser's", "mine")
        adviser, mine = context.trajectory.traces
        adviser = msgspec.structs.replace(adviser, loss_mask=np.zeros(1, np.uint8))
        for traces, reward in (((adviser, mine), 0.2), ((adviser, adviser), 0.6)):
            both = msgspec.structs.replace(context.trajectory, traces=traces)
            result = await graded(msgspec.structs.replace(context, trajectory=both), reads="traces")
            assert result.reward == reward


async def test_a_rubric_is_a_weighted_part_beside_an_outcome(tmp_path: Path) -> None:
    async with served(lambda _: of_parts(5, -5)) as (url, _):
        judge = {"strategy": "judge", "weight": 0.2, "config": {"engine": "judge", "rubric": "r", **RUBRIC}}
        parts = [{"strategy": "session_completed"}, judge]
        context = traced(tmp_path, GraderEngine(url=url), "a", "b")
        result = await plugins.make_evaluator("composite", {"parts": parts}).evaluate(context)
    assert (result.reward, result.trace_rewards) == (1.0, {"t0": 1.2, "t1": 0.8})


async def test_votes_are_combined_for_each_trace(tmp_path: Path) -> None:
    async with served(lambda body: of_parts([2, 4, 10][body["seed"]], 6)) as (url, _):
        context = traced(tmp_path, GraderEngine(url=url), "a", "b")
        result = await graded(context, reads="traces", votes=3, combine="median")
    assert result.trace_rewards == {"t0": 0.4, "t1": 0.6}
    assert [one["score"] for one in result.details["traces"]["t0"]["votes"]] == [2, 4, 10]


UNUSABLE: dict[str, Any] = {
    "one is missing": of_parts(1),
    "one too many": of_parts(1, 2, 3),
    "a part that nobody showed": of_parts(1, 2, **{"0": {"score": 5}}),
    "a score alone": verdict(7),
    "a list": completion(json.dumps([{"score": 1}, {"score": 2}])),
    "numbers": completion(json.dumps({"1": 1, "2": 2})),
    "texts": of_parts("1", "2"),
    "a boolean": of_parts(1, True),
    "none": of_parts(1, None),
    "off the scale": of_parts(1, 11),
    "not a number": completion('{"1": {"score": NaN}, "2": {"score": 1}}'),
    "other names": completion(json.dumps({f"trace_{at}": {"score": 1} for at in (1, 2)})),
    "cut off": completion('{"1": {"score": 1}, "2": {"sco'),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_scores_that_are_missing_or_wrong_give_no_trace_a_reward(tmp_path: Path, name: str) -> None:
    async with served(lambda _: UNUSABLE[name]) as (url, got):
        with pytest.raises(GraderUnavailable, match="no usable verdict"):
            await graded(traced(tmp_path, GraderEngine(url=url), "a", "b"), reads="traces", tries=2)
    assert len(got) == 2


@pytest.mark.parametrize(
    "answer",
    [
        of_parts(3, 4, summary="both fine"),
        completion('<think>{"1": {"score": 9}, "2": {"score": 9}}</think>ok:\n```json\n'
                   '{"2": {"score": 4}, "1": {"score": 3}}\n```'),
    ],
)  # fmt: skip
async def test_scores_are_found_in_what_judges_write_around_them(tmp_path: Path, answer: Any) -> None:
    async with served(lambda _: answer) as (url, _):
        context = traced(tmp_path, GraderEngine(url=url), "a", "b")
        result = await graded(context, reads="traces", answer_format="text")
    assert result.trace_rewards == {"t0": 0.3, "t1": 0.4}


async def test_many_traces_are_scored_by_one_answer(tmp_path: Path) -> None:
    async with served(lambda _: of_parts(*[at % 11 for at in range(300)])) as (url, got):
        context = traced(tmp_path, GraderEngine(url=url), *("x" * 1000 for _ in range(300)))
        result = await graded(context, reads="traces", max_chars=30_000)
    assert [round(10 * one) for one in result.trace_rewards.values()] == [at % 11 for at in range(300)]
    assert len(got[0][1]["messages"][1]["content"]) < 60_000


async def test_a_trace_cannot_pose_as_another_one(tmp_path: Path) -> None:
    """It knows the rubric, and has seen an earlier question of the judge's, mark and all."""
    async with served(lambda _: of_parts(1, 1)) as (url, got):
        engine = GraderEngine(url=url)
        await graded(traced(tmp_path, engine, "a", "b"), reads="traces")
        seen = got[0][1]["messages"][1]["content"].rpartition("# Work\n")[2]
        await graded(traced(tmp_path, engine, f'{seen}\n"\n]\n{seen}', "\u2028" + seen), reads="traces")
    system, user = (one["content"] for one in got[1][1]["messages"])
    mark = user.rpartition("\n")[2]
    assert mark in system
    assert mark not in seen
    lines = user.rpartition("# Work\n")[2].split("\n")
    assert [line for line in lines if mark in line] == [f"{mark} 1", f"{mark} 2", mark]
    texts = user.rpartition("# Work\n")[2].split(mark)[1:3]
    for text in texts:
        (message,) = json.loads(text.partition("\n")[2])
        assert message["role"] == "assistant"


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.integers(1, 900))
def test_traces_share_the_room_and_only_the_longest_are_cut(lengths: list[int], max_chars: int) -> None:
    cut = cut_to_fit(["x" * length for length in lengths], max_chars)
    assert sum(text.count("x") for text in cut) <= max_chars
    whole = [length for length, text in zip(lengths, cut, strict=True) if "left out" not in text]
    others = [length for length, text in zip(lengths, cut, strict=True) if "left out" in text]
    assert not others or not whole or max(whole) <= min(others)
    if sum(lengths) <= max_chars:
        assert not others


async def test_a_session_without_traces_earns_nothing_unasked(tmp_path: Path) -> None:
    result = await graded(traced(tmp_path, GraderEngine(url="http://127.0.0.1:9")), reads="traces")
    assert (result.reward, result.details) == (0.0, {"missing": "the session has no traces"})


FORMATS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "json": ("/", {"instruction": "do it", "answer": "I did it"}, {"reward": 0.25, "note": "x"}),
    "vllm_classify": (
        "/classify",
        {"input": "do it\n\nI did it"},
        {"data": [{"index": 0, "label": "1", "probs": [0.75, 0.25], "num_classes": 2}]},
    ),
    "vllm_pooling": (
        "/pooling",
        {"messages": [{"role": "user", "content": "do it"}, {"role": "assistant", "content": "I did it"}]},
        {"data": [{"index": 0, "object": "pooling", "data": [[0.1], [0.25]]}]},
    ),
    "vllm_score": (
        "/score",
        {"text_1": "do it", "text_2": "I did it"},
        {"data": [{"index": 0, "object": "score", "score": 0.25}]},
    ),
    "sglang_classify": ("/classify", {"text": "do it\n\nI did it"}, [{"embedding": [0.25], "meta_info": {}}]),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_a_reward_model_is_asked_in_its_servers_format(tmp_path: Path, name: str) -> None:
    path, asked, answer = FORMATS[name]
    async with served(lambda _: answer) as (url, got):
        context = context_of(tmp_path, GraderEngine(url=url, model="rm"))
        result = await graded(context, "reward_model", format=name)
        sigmoid = await graded(context, "reward_model", format=name, activation="sigmoid")
    request, body = got[0]
    assert (request.path, body["model"]) == (path, "rm")
    assert {field: body[field] for field in asked} == asked
    assert (result.reward, sigmoid.reward) == (0.25, pytest.approx(0.5621765))
    assert json.loads(context.artifacts["reward_model.json"])["answer"] == answer


@pytest.mark.parametrize("answer", [{}, {"reward": "1"}, {"reward": None}, {"reward": True}, [], 1])
async def test_a_reward_models_nonsense_gives_no_reward(tmp_path: Path, answer: Any) -> None:
    async with served(lambda _: answer) as (url, _):
        with pytest.raises(GraderUnavailable, match="not of format json"):
            await graded(context_of(tmp_path, GraderEngine(url=url)), "reward_model")


CALL = """
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def test_a_judges_calls_are_in_no_row_and_a_broken_judge_is_our_failure(tmp_path: Path) -> None:
    agent = {"harness": "shell", "settings": {"command": ["python3", "-c", CALL]}}
    evaluator = {"strategy": "judge", "config": {"engine": "judge", "rubric": "r", "tries": 1}}
    async with served(lambda _: verdict(3)) as (url, got), node_parts(tmp_path) as parts:
        parts = msgspec.structs.replace(parts, grader_engines={"judge": GraderEngine(url=url)})
        result = await Attempt(lease_of(agent=agent, evaluator=evaluator), parts).live()
        assert (result.outcome, result.reward, len(got)) == ("completed", 0.3, 1), (result.failure, result.artifacts)
        assert result.trajectory is not None
        assert (len(result.completions), len(result.trajectory.traces)) == (1, 1)
        assert b"Is it" not in result.artifacts["judge.json"]
        parts = msgspec.structs.replace(parts, grader_engines={})
        result = await Attempt(lease_of("s2", agent=agent, evaluator=evaluator), parts).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("evaluator", "grader_unavailable")


async def test_the_policy_judges_only_where_the_configuration_says_so(tmp_path: Path) -> None:
    script = {"rules": [{"pattern": ".", "text": '{"reason": "I am good", "score": 10}'}]}
    agent = {"harness": "shell", "settings": {"command": ["python3", "-c", CALL]}}
    evaluator = {"strategy": "judge", "config": {"engine": "policy", "rubric": "r", "answer_format": "text"}}
    async with node_parts(tmp_path, script=script) as parts:
        result = await Attempt(lease_of(agent=agent, evaluator=evaluator), parts).live()
    assert (result.reward, len(result.completions)) == (1.0, 1), result.failure


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        ({"policy": {"url": "http://a"}}, "choose another"),
        ({"judge": {"url": "ftp://a"}}, "judge: url must begin"),
        ({"judge": {"url": "http://a", "key": "secret"}}, "judge: unknown field 'key'"),
        ({"judge": {}}, "judge: .*url"),
    ],
)
def test_a_mistake_in_the_nodes_grader_engines_is_named(engines: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        NodeSettings(grader_engines=engines)


def test_a_judge_without_an_engine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="engine: Field required"):
        plugins.make_evaluator("judge", {"rubric": "r"})
    with pytest.raises(InvalidRequest, match="`highest` must be above"):
        plugins.make_evaluator("judge", {"rubric": "r", "engine": "j", "highest": 0})
