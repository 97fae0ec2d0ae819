"""Routed experts on their way from an engine's reply to exports and trainers (`capture.routed_experts`).

The engines are stand-ins that write the wire as vLLM 0.32.0 and SGLang 0.5.23 do (`support.engines.expert_engines`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from gangline.domain.errors import EngineIncapable, InvalidGroup
from gangline.domain.evidence.experts import EXPERTS
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.audit import audit
from gangline.rows.builders.tree import TreeBuilder
from gangline.rows.parquet import read_parquet, write_parquet
from gangline.rows.rows import Row, read_jsonl, read_msgpack, rows_of, write_jsonl, write_msgpack
from gangline.server.run import serving
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import rows_of as trainer_rows
from gangline.wire.client.server import ServerClient
from support.engines.expert_engines import FakeMoeSglang, FakeMoeVllm, Routing, moe_server
from support.engines.expert_talks import result_of, say, talk, twenty_thousand_tokens
from support.node.node import TOKEN, running_node
from support.node.proxy import proxied_engine
from support.sdk.talking_agent import TEMPERATURE, tasks

FORMATS = {
    "jsonl": (write_jsonl, read_jsonl),
    "msgpack": (write_msgpack, read_msgpack),
    "parquet": (write_parquet, read_parquet),
}


def _ids(row: Row) -> list[int]:
    return [*row.prompt_ids.tolist(), *row.response_ids.tolist()]


def _assert_equal(row: Row, routing: Routing) -> None:
    assert row.routed_experts is not None
    found, want = row.routed_experts.array(), routing.of(_ids(row))
    assert found.dtype == want.dtype
    assert np.array_equal(found, want)


async def test_twenty_thousand_tokens_of_48_layers_and_8_experts_are_equal_bit_by_bit_everywhere(
    tmp_path: Path,
) -> None:
    routing, result = await twenty_thousand_tokens(tmp_path / "journal")
    (row,) = rows_of(result)
    assert len(_ids(row)) >= 20_000
    assert [one.prompt_source for one in row.certificates] == ["engine"] + ["stitched"] * 7
    _assert_equal(row, routing)
    held = sum(len(one.routed_experts) for one in result.completions)
    assert held == (len(_ids(row)) - 1) * 48 * 8  # each position once, a byte a number
    for suffix, (write, read) in FORMATS.items():
        path = tmp_path / f"rows.{suffix}"
        write([row], path)
        (again,) = read(path)
        _assert_equal(again, routing)
    (trained,) = trainer_rows(Group("t1", (result,)), 1, replays_experts=True)
    assert trained.routed_experts is not None
    assert np.array_equal(trained.routed_experts, routing.of(_ids(row)))


async def test_records_of_an_open_session_hold_no_experts_in_memory() -> None:
    async with moe_server(FakeMoeVllm()) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        assert [len(one.routed_experts) for one in running.session.tree] == [0, 0]
        assert all(len(one.routed_experts) > 0 for one in running.journal.completions)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
async def test_each_type_that_vllm_sends_is_read(dtype: str) -> None:
    fake = FakeMoeVllm(Routing(num_experts=200), dtype=dtype)
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        (row,) = rows_of(result_of(running.journal.completions))
    assert row.routed_experts is not None
    assert np.array_equal(row.routed_experts.array(), fake.routing.of(_ids(row)))


async def test_more_than_256_experts_take_two_bytes() -> None:
    fake = FakeMoeVllm(Routing(num_experts=512))
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        (row,) = rows_of(result_of(running.journal.completions))
    assert row.routed_experts is not None
    assert row.routed_experts.number == "uint16"
    _assert_equal(row, fake.routing)


@pytest.mark.parametrize("says_dtype", [None, "uint8"])
async def test_sglangs_experts_get_the_shape_that_the_probe_found(says_dtype: str | None) -> None:
    fake = FakeMoeSglang(routing=Routing(num_layers=5, num_chosen=4), says_dtype=says_dtype)
    async with (
        moe_server(fake) as url,
        proxied_engine(SglangEngine(url, experts_per_token=4), routed_experts=True) as running,
    ):
        await talk(running, "hello", "more", "and more")
        (row,) = rows_of(result_of(running.journal.completions))
    assert [body["routed_experts_start_len"] for body in fake.bodies if body.get("return_routed_experts")][1] == 0
    assert fake.bodies[-1]["routed_experts_start_len"] > 0
    _assert_equal(row, fake.routing)


async def test_a_stitched_call_asks_only_for_positions_that_its_parent_lacks() -> None:
    fake = FakeMoeVllm()
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        first, second = running.journal.completions
    assert [body["routed_experts_prompt_start"] for body in fake.bodies] == [0, second.prompt_shared - 1]
    assert second.certificate.routed_experts is not None
    assert second.certificate.routed_experts.start == second.prompt_shared - 1
    assert first.certificate.routed_experts is not None
    assert first.certificate.routed_experts.end == second.prompt_shared - 1


async def test_an_engine_that_ignores_the_start_reports_more_and_each_position_is_still_kept_once() -> None:
    fake = FakeMoeVllm(ignores_start=True)
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more", "and more")
        result = result_of(running.journal.completions)
    (row,) = rows_of(result)
    _assert_equal(row, fake.routing)
    per_token = 3 * 2
    assert sum(len(one.routed_experts) for one in result.completions) == (len(_ids(row)) - 1) * per_token


async def test_prompts_that_the_engine_renders_are_asked_for_whole(tmp_path: Path) -> None:
    fake = FakeMoeVllm()
    async with (
        moe_server(fake) as url,
        proxied_engine(VllmEngine(url), routed_experts=True, tier="observe") as running,
    ):
        await talk(running, "hello", "more")
        rows = rows_of(result_of(running.journal.completions))
    assert [body["routed_experts_prompt_start"] for body in fake.bodies] == [0, 0]
    for row in rows:
        _assert_equal(row, fake.routing)


async def test_rows_of_the_tree_builder_have_the_experts_of_their_whole_prompts() -> None:
    fake = FakeMoeVllm(texts=["one", "two", "three"])
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        async with running.client() as client:
            messages: list[Any] = []
            await say(client, messages, "hello")
            other = list(messages)
            await say(client, messages, "left")
            await say(client, other, "right")
        result = result_of(running.journal.completions, TreeBuilder())
        whole = result_of(running.journal.completions)
    assert result.trajectory is not None
    assert any(trace.shared_prefix is not None for trace in result.trajectory.traces)
    assert list(EXPERTS.columns(result).values()) == list(EXPERTS.columns(whole).values())
    for row in rows_of(whole):
        _assert_equal(row, fake.routing)


async def test_choices_of_one_call_have_their_own_experts() -> None:
    fake = FakeMoeVllm()
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        async with running.client() as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], n=2)
        rows = rows_of(result_of(running.journal.completions))
    assert len(rows) == 2
    for row in rows:
        _assert_equal(row, fake.routing)


@pytest.mark.parametrize(
    ("kind", "options", "reports"),
    [(VllmEngine, {}, False), (SglangEngine, {}, True), (SglangEngine, {"experts_per_token": 2}, False)],
    ids=["vLLM without its option", "SGLang without a shape", "SGLang without its option"],
)
async def test_an_engine_that_reports_none_is_refused_before_it_samples(
    kind: type[Any], options: dict[str, Any], reports: bool
) -> None:
    fake = FakeMoeVllm(reports=reports) if kind is VllmEngine else FakeMoeSglang(reports=reports)
    async with moe_server(fake) as url, proxied_engine(kind(url, **options), routed_experts=True) as running:
        with pytest.raises(openai.APIStatusError, match="--enable-return-routed-experts"):
            await talk(running, "hello")
        assert running.journal.completions == []


async def test_a_number_of_experts_that_cannot_be_is_refused_at_the_probe() -> None:
    async with moe_server(FakeMoeSglang(routing=Routing(num_layers=3, num_chosen=2))) as url:
        engine = SglangEngine(url, experts_per_token=7)
        with pytest.raises(EngineIncapable, match="experts_per_token cannot be 7"):
            await engine.probe()
        await engine.close()


async def test_a_reply_whose_experts_a_router_strips_is_refused() -> None:
    fake = FakeMoeVllm(strips_from=2)
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        with pytest.raises(openai.APIError, match="returned no routed experts"):
            await talk(running, "hello", "more")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"lost_rows": 1}, "experts of"),
        ({"ignores_ids_from": 1, "spells": True, "texts": ["this is the answer"]}, "another prompt"),
    ],
)
async def test_a_row_with_unknown_positions_says_so_and_no_replay_takes_it(fault: dict[str, Any], why: str) -> None:
    fake = FakeMoeVllm(**fault)
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        result = result_of(running.journal.completions)
    missing = [row.routed_experts.missing for row in rows_of(result) if row.routed_experts is not None]
    assert any(one is not None and why in one for one in missing)
    with pytest.raises(InvalidGroup, match=f"s1.*cannot be trained with replayed routing.*{why}"):
        trainer_rows(Group("t1", (result,)), 1, replays_experts=True)
    assert trainer_rows(Group("t1", (result,)), 1)  # it is exact otherwise


async def test_nothing_is_asked_for_or_kept_unasked() -> None:
    fake = FakeMoeVllm()
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url)) as running:
        await talk(running, "hello", "more")
        result = result_of(running.journal.completions)
    assert not any("routed_experts_prompt_start" in body for body in fake.bodies)
    assert [row.routed_experts for row in rows_of(result)] == [None]
    with pytest.raises(InvalidGroup, match=r"sampled without capture\.routed_experts"):
        trainer_rows(Group("t1", (result,)), 1, replays_experts=True)


@pytest.mark.parametrize("harmed", [0, 1], ids=["of the first turn", "of the last turn"])
async def test_other_bytes_than_the_certified_ones_are_found(harmed: int) -> None:
    async with moe_server(FakeMoeVllm()) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello", "more")
        records = list(running.journal.completions)
    whole = result_of(records)
    assert whole.trajectory is not None
    assert audit(whole.trajectory, records).violations == ()
    records[harmed] = msgspec.structs.replace(
        records[harmed], routed_experts=bytes(len(records[harmed].routed_experts))
    )
    (row,) = rows_of(result_of(records))
    assert row.routed_experts is not None
    told = f"{records[harmed].completion_id} holds other experts than its certificate says"
    assert row.routed_experts.missing == told
    (found,) = audit(whole.trajectory, records).violations
    assert (found.rule, found.message) == ("experts", f"s1.t0: {told}")


async def test_rows_of_a_result_without_its_records_say_that_the_experts_are_missing() -> None:
    async with moe_server(FakeMoeVllm()) as url, proxied_engine(VllmEngine(url), routed_experts=True) as running:
        await talk(running, "hello")
        result = result_of(running.journal.completions)
    (row,) = rows_of(msgspec.structs.replace(result, completions=()))
    assert row.routed_experts is not None
    assert "is not among the session's completions" in (row.routed_experts.missing or "")


async def test_sessions_of_a_whole_service_have_their_experts_when_they_are_fetched(tmp_path: Path) -> None:
    """An agent in its sandbox, a node, the server's store, and the client that a trainer uses."""
    fake = FakeMoeVllm(texts=["one", "two", "three"])
    task = next(tasks()) | {"num_samples": 2, "capture": {"routed_experts": True}}
    async with (
        moe_server(fake) as engine_url,
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
        running_node(tmp_path / "node", engine_url, server_url=server.url),
        ServerClient(server.url, TOKEN) as client,
    ):
        await client.submit(task)
        await client.wait(task["task_id"])
        results = await client.result(task["task_id"])
    assert [one.outcome for one in results] == ["completed"] * 2, results
    group = Group(task["task_id"], tuple(results))
    for row in trainer_rows(group, 2, temperature=TEMPERATURE, replays_experts=True):
        assert row.routed_experts is not None
        assert np.array_equal(row.routed_experts, fake.routing.of([*row.prompt_ids, *row.response_ids]))


async def test_calls_in_tokens_have_their_experts_too(tmp_path: Path) -> None:
    fake = FakeMoeVllm()
    async with moe_server(fake) as url, running_node(tmp_path, url) as node:
        opened = await node.client.open_session(capture={"routed_experts": True})
        ids = [5, 6, 7]
        for _ in range(2):
            body = {"prompt_ids": ids, "sampling_params": {"max_tokens": 50}}
            status, said = await node.ask("POST", f"/s/{opened.session_id}/generate", body, opened.api_key)
            assert status == 200, said
            ids = [*ids, *said["output_ids"], 9]
        result = await node.client.finalize(opened.session_id, completions=True)
    (row,) = rows_of(result)
    _assert_equal(row, fake.routing)
    assert [body["routed_experts_prompt_start"] for body in fake.bodies] == [0, len(ids) // 2]
