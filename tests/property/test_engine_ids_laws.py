"""Ids that no vocabulary has: an engine that answers them is refused, or the record may not be trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import EngineUnavailable
from gangline.domain.tokens import logprobs, token_ids
from gangline.models.engines.contract import EngineCapabilities, EngineChoice, ReplyAccumulator, assistant_message
from gangline.models.engines.generate.wire import SglangGenerate, VllmGenerate
from gangline.models.engines.replies import SentIds, decode, ids_from_json
from gangline.models.engines.sglang.wire import SglangReply
from gangline.models.engines.sglang.wire import engine_reply as sglang_reply
from gangline.models.engines.vllm.calls import CallsOfChoices
from gangline.models.engines.vllm.engine import decode_events, engine_deltas
from gangline.models.engines.vllm.wire import WireReply, decode_reply, engine_reply
from gangline.node.capture.capture import Prompt, completion_of
from gangline.node.capture.placing import Place, history_of_key

_ids = st.lists(
    st.one_of(st.integers(0, 200_000), st.sampled_from([-1, -(2**31), 2**31, 2**32, 2**63, 2**64, 2**70])),
    min_size=1,
    max_size=4,
)
Found = list[int] | None


def _vllm(sampled: list[int], prompt: list[int]) -> tuple[Found, Found]:
    content = [{"logprob": -0.5} for _ in sampled]
    choice = {
        "index": 0,
        "message": {},
        "token_ids": sampled,
        "logprobs": {"content": content},
        "finish_reason": "stop",
    }
    body = json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode()
    return _of(engine_reply(decode_reply(body, WireReply, "http://x")))


def _vllm_stream(sampled: list[int], prompt: list[int]) -> tuple[Found, Found]:
    content = [{"logprob": -0.5} for _ in sampled]
    choice = {"index": 0, "delta": {}, "token_ids": sampled, "logprobs": {"content": content}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode()
    gathered = ReplyAccumulator()
    for delta in engine_deltas(decode_events([body], WireReply, "http://x"), CallsOfChoices()):
        gathered.feed(delta)
    return _of(gathered.reply())


def _sglang(sampled: list[int], prompt: list[int]) -> tuple[Found, Found]:
    meta = {"output_token_logprobs": [[-0.5, token, None] for token in sampled]}
    choice = {"index": 0, "message": {}, "meta_info": meta, "prompt_token_ids": prompt, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    try:
        return _of(sglang_reply(decode(body, SglangReply, "http://x")))
    except ValueError as error:  # as its client does
        raise EngineUnavailable(str(error)) from error


def _generate_vllm(sampled: list[int], prompt: list[int]) -> tuple[Found, Found]:
    choice = {"token_ids": sampled, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode()
    return _of_sampled(VllmGenerate().read(body, "http://x"))


def _generate_sglang(sampled: list[int], prompt: list[int]) -> tuple[Found, Found]:
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": len(sampled), "prompt_token_ids": prompt}
    return _of_sampled(
        SglangGenerate().read(json.dumps({"output_ids": sampled, "meta_info": meta}).encode(), "http://x")
    )


def _of(reply: Any) -> tuple[Found, Found]:
    return reply.choices[0].sampled_ids.tolist(), reply.prompt_ids.tolist()


def _of_sampled(sampled: Any) -> tuple[Found, Found]:
    return sampled.ids, sampled.prompt_ids.tolist()


@pytest.mark.parametrize("read", [_vllm, _vllm_stream, _sglang, _generate_vllm, _generate_sglang])
@given(sampled=_ids, prompt=_ids)
def test_an_answer_holds_ids_or_is_refused(
    read: Callable[[list[int], list[int]], tuple[Found, Found]], sampled: list[int], prompt: list[int]
) -> None:
    if all(0 <= token < 2**31 for token in (*sampled, *prompt)):
        assert read(sampled, prompt) == (sampled, prompt)
        return
    with pytest.raises(EngineUnavailable):
        read(sampled, prompt)


_plain = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(
    sent=_plain,
    answered=st.one_of(st.none(), _plain),
    cut=st.integers(0, 6),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_an_echo_is_read_as_the_engine_wrote_it(
    sent: list[int], answered: list[int] | None, cut: int, separators: tuple[str, str]
) -> None:
    """Whether it is what was sent (None), the beginning of that with other ids behind it, or something else."""
    echo = sent if answered is None else sent[:cut] + answered
    raw = msgspec.Raw(json.dumps(echo, separators=separators).encode())
    found = ids_from_json(raw, SentIds.of(token_ids(sent)))
    assert found is not None
    assert found.tolist() == echo


@given(
    sampled=st.lists(st.integers(-3, 30), min_size=1, max_size=4),
    prompt=st.lists(st.integers(-3, 30), max_size=4),
    num_ids=st.sampled_from([None, 20]),
)
def test_a_record_with_an_id_outside_of_the_vocabulary_is_never_trained_on(
    sampled: list[int], prompt: list[int], num_ids: int | None
) -> None:
    """Of any engine client, also one that did not look."""
    choice = EngineChoice(
        index=0,
        message=assistant_message("", "x"),
        finish_reason="stop",
        sampled_ids=token_ids(sampled),
        logprobs=logprobs(np.full(len(sampled), -0.5)),
    )
    capabilities = EngineCapabilities(
        engine="x",
        version="1",
        model="m",
        max_context=None,
        reports_ids=True,
        takes_prompt_ids=True,
        streams_ids=True,
        renders=True,
        logprob_kind="raw",
        num_ids=num_ids,
    )
    record = completion_of(
        ModelCall(dialect="openai_chat", model="m", messages=()),
        Place("k", None, 0, (), history_of_key("k")),
        Prompt(source="engine", context="first", parent_id=None, shared=0, suffix_ids=token_ids(prompt)),
        choice,
        capabilities,
        session_id="s",
        attempt=1,
        started_at=0.0,
        finished_at=0.0,
    )
    is_known = all(0 <= token < (31 if num_ids is None else num_ids) for token in (*sampled, *prompt))
    assert record.trainable == is_known
    assert is_known or "vocabulary" in (record.certificate.untrainable or "")
