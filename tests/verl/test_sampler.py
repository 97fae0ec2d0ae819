"""verl's own client as our engine: aborted calls, versions, and what it cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf

from gangline.domain.errors import EngineIncapable, EngineMalformed
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.trainers.own_engine import served
from gangline.train.trainers.verl.sampler import VerlSampler, one_attempt
from gangline.train.trainers.verl.settings import GanglineSettings
from gangline.train.trainers.verl.worker import with_own_address
from support.training.verl_server import Server

ASKED = SampleRequest(prompt_ids=(1, 2), max_tokens=6, stop_ids=frozenset({9}), temperature=0.5)


def sampler(generate: Any) -> VerlSampler:
    return VerlSampler(generate, TinyTokenizer(), model_name="policy", context_length=64, num_ids=300, retry_s=0.0)


async def sampled(one: VerlSampler, request: SampleRequest = ASKED) -> list[SampledToken]:
    return [token async for token in one.sample(request)]


def output(ids: Sequence[int], reason: str = "completed", version: int | None = 1, **changes: Any) -> Any:
    fields = {"token_ids": list(ids), "log_probs": [-0.5] * len(ids), "stop_reason": reason}
    return SimpleNamespace(**{**fields, "extra_fields": {"global_steps": version}, **changes})


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient"])
async def test_an_aborted_call_goes_on_and_each_token_has_its_version(queue: Any, kind: str) -> None:
    import ray
    import verl.workers.rollout.llm_server as servers

    parts = [([3, 4], "aborted"), ([], "aborted"), ([5, 9], "completed")]
    server = ray.remote(Server).remote(parts)
    balancer = ray.remote(servers.GlobalRequestLoadBalancer).remote(servers={"one": server})
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 64}}})
    client = getattr(servers, kind)(config=config, load_balancer_handle=balancer)
    tokens = await sampled(sampler(one_attempt(client)))
    assert [(token.token_id, token.version, token.finish_reason) for token in tokens] == [
        (3, 1, None),
        (4, 1, None),
        (5, 3, None),
        (9, 3, "stop"),
    ]
    asked = await server.asked.remote()
    assert [prompt for prompt, _ in asked] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert [parameters["max_tokens"] for _, parameters in asked] == [6, 4, 4]
    assert asked[0][1]["temperature"] == 0.5
    assert asked[0][1]["stop_token_ids"] == [9]


async def test_nodes_reach_the_engine_at_the_machines_address(queue: Any) -> None:
    settings = with_own_address(GanglineSettings(url="http://127.0.0.1:1", host="0.0.0.0"))
    async with served(sampler(None), settings) as url, aiohttp.ClientSession() as http:
        assert "0.0.0.0" not in url
        async with http.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"


async def test_a_reply_as_long_as_it_may_be_ends_by_its_length() -> None:
    async def generate(**_: Any) -> Any:
        return output([3, 4, 5, 6, 7, 8])

    tokens = await sampled(sampler(generate))
    assert [token.finish_reason for token in tokens] == [None] * 5 + ["length"]


async def test_a_call_aborted_at_its_last_token_is_whole() -> None:
    async def generate(**_: Any) -> Any:
        return output([3, 4, 5, 6, 7, 8], "aborted")

    assert (await sampled(sampler(generate)))[-1].finish_reason == "length"


async def test_a_server_without_versions_gives_tokens_of_unknown_version() -> None:
    async def generate(**_: Any) -> Any:
        return output([9], version=None)

    assert [token.version for token in await sampled(sampler(generate))] == [-1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [(output([3], log_probs=None), EngineIncapable), (output([3, 4], log_probs=[-0.5]), EngineMalformed)],
)
async def test_tokens_without_log_probs_are_refused(answer: Any, error: type[Exception]) -> None:
    async def generate(**_: Any) -> Any:
        return answer

    with pytest.raises(error, match="log-probs"):
        await sampled(sampler(generate))
