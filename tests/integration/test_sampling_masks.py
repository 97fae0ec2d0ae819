"""Sampling masks on their way from an engine's reply to exports and trainers (`capture.sampling_masks`).

The embedded engine draws among real ids here, and transformers' own model says whether they are the right ones.
SGLang is a stand-in that writes what 0.5.23 writes (`support.engines.sglang_engine`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import torch

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.models.engines.generate.engine import GenerateEngine
from gangline.models.engines.generate.routes import generate_engine
from gangline.models.engines.generate.template import TemplateText
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.audit import audit
from gangline.rows.builders.tree import TreeBuilder
from gangline.rows.parquet import read_parquet, write_parquet
from gangline.rows.rows import read_jsonl, read_msgpack, rows_of, write_jsonl, write_msgpack
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import rows_of as trainer_rows
from support.engines.expert_engines import FakeMoeVllm, moe_server
from support.engines.expert_talks import result_of, talk
from support.engines.mask_talks import CUT, TEMPERATURE, TOP_K, TOP_P, WHOLE, drawn, embedded
from support.engines.models import reference_model, write_tiny_model
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.node.proxy import proxied_engine

Change = Callable[[list[list[int]]], list[list[int]]]

FORMATS = {
    "jsonl": (write_jsonl, read_jsonl),
    "msgpack": (write_msgpack, read_msgpack),
    "parquet": (write_parquet, read_parquet),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=TinyTokenizer().num_ids)


def _kept(logits: torch.Tensor) -> set[int]:
    """Top-k, then the fewest of these that reach top-p together."""
    values, ids = (logits / TEMPERATURE).topk(TOP_K)
    shares = values.double().softmax(-1)
    return {int(token) for token, before in zip(ids, shares.cumsum(-1) - shares, strict=True) if before < TOP_P}


def _assert_of_the_model(result: SessionResult, folder: Path) -> None:
    """Masks and log-probs are those of the model itself, computed again over whole rows."""
    model = reference_model(folder)
    for row in trainer_rows(Group("t1", (result,)), 1, temperature=TEMPERATURE, replays_masks=True):
        assert row.sampling_mask is not None
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        sets = row.sampling_mask.sets()
        assert len(sets) == len(row.response_ids)
        for at in range(len(sets)):
            if not row.loss_mask[at]:
                assert sets[at] == []
                continue
            before = logits[len(row.prompt_ids) + at - 1]
            assert set(sets[at]) == _kept(before)
            among = (before[sets[at]] / TEMPERATURE).log_softmax(-1)
            value = float(among[sets[at].index(int(row.response_ids[at]))])
            assert value == pytest.approx(float(row.logprobs[at]), abs=1e-4)
        assert any(1 < len(kept) < TOP_K for kept in sets)


async def test_masks_and_logprobs_are_those_of_the_model_through_journal_rows_and_formats(
    folder: Path, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path / "journal")
    await journal.open_attempt(AttemptOpened("s1", 1, "t1", 1))
    async with drawn(folder, journal=journal) as running:
        await talk(running, "hello", "more", "and more")  # the second one streams, and is asked for whole
        assert [len(one.sampling_mask) for one in running.session.tree] == [0, 0, 0]
    await journal.close()
    reopened = Journal.open(tmp_path / "journal")
    records = await reopened.read(AttemptKey("s1", 1))
    await reopened.close()
    result = result_of(records)
    assert {one.certificate.logprobs for one in records} == {"processed"}
    _assert_of_the_model(result, folder)
    rows = rows_of(result)
    assert result.trajectory is not None
    report = audit(result.trajectory, records)
    assert (report.violations, report.left_out) == ((), {})
    for suffix, (write, read) in FORMATS.items():
        path = tmp_path / f"rows.{suffix}"
        write(rows, path)
        again = list(read(path))
        assert [row.sampling_mask for row in again] == [row.sampling_mask for row in rows]
        assert all(row.sampling_mask is not None for row in again)


async def test_rows_of_the_tree_builder_have_the_masks_of_their_own_responses(folder: Path) -> None:
    async with drawn(folder) as running:
        await talk(running, "hello", "more")
        result = result_of(running.journal.completions, TreeBuilder())
    _assert_of_the_model(result, folder)


async def test_choices_of_one_call_have_their_own_masks(folder: Path) -> None:
    async with drawn(folder) as running:
        async with running.client() as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], n=3)
        result = result_of(running.journal.completions)
    assert len(result.completions) == 3
    _assert_of_the_model(result, folder)


async def test_a_mask_ends_with_its_tokens_at_a_stop_string(folder: Path) -> None:
    async with drawn(folder) as running:
        async with running.client() as client:
            ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            said = (await client.chat.completions.create(**ask, seed=3)).choices[0].message.content or ""
            await client.chat.completions.create(**ask, seed=3, stop=[said[3:5]])
        whole, cut = running.journal.completions
        result = result_of([cut])
    assert len(cut.sampled_ids) < len(whole.sampled_ids)
    assert cut.certificate.sampling_mask is not None
    assert cut.certificate.sampling_mask.num_tokens == len(cut.sampled_ids)
    _assert_of_the_model(result, folder)


async def test_where_nothing_is_cut_away_nothing_is_kept_and_every_trainer_takes_the_row(folder: Path) -> None:
    async with drawn(folder, sampling=WHOLE, returns_masks=False) as running:
        await talk(running, "hello")
        result = result_of(running.journal.completions)
    (completion,) = result.completions
    assert (completion.sampling_mask, completion.certificate.sampling_mask) == (b"", None)
    assert [row.sampling_mask for row in rows_of(result)] == [None]
    group = Group("t1", (result,))
    (plain,) = trainer_rows(group, 1, temperature=TEMPERATURE)
    (replayed,) = trainer_rows(group, 1, temperature=TEMPERATURE, replays_masks=True)
    assert plain.loss_mask.any()
    assert replayed.sampling_mask is not None
    assert not replayed.sampling_mask.counts.any()


@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_an_engine_that_reports_none_is_refused_before_it_samples(folder: Path, kind: str) -> None:
    async with embedded(folder, returns_masks=kind == "chat") as url:
        engine: Any = generate_engine(url) if kind == "generate" else VllmEngine(url)
        async with proxied_engine(engine, sampling_masks=True, sampling=CUT) as running:
            with pytest.raises(openai.APIStatusError, match="--return-sampling-mask"):
                await talk(running, "hello")
            assert running.journal.completions == []


async def test_a_trainer_that_replays_no_masks_refuses_the_row_by_name(folder: Path) -> None:
    async with drawn(folder) as running:
        await talk(running, "hello")
        result = result_of(running.journal.completions)
    with pytest.raises(InvalidGroup, match=r"s1\.t0 was drawn from a part of the vocabulary.*sampling-masks\.md"):
        trainer_rows(Group("t1", (result,)), 1, temperature=TEMPERATURE)


async def test_without_the_setting_such_turns_are_masked_as_ever(folder: Path) -> None:
    async with (
        embedded(folder) as url,
        proxied_engine(generate_engine(url), sampling=CUT) as running,
    ):
        await talk(running, "hello")
        result = result_of(running.journal.completions)
    assert result.trajectory is not None
    (why,) = audit(result.trajectory, result.completions).left_out
    assert why.startswith("sampled with top_p 0.8, top_k 6: set")


async def test_other_bytes_than_the_certified_ones_are_found(folder: Path) -> None:
    async with drawn(folder) as running:
        await talk(running, "hello", "more")
        records = list(running.journal.completions)
    whole = result_of(records)
    assert whole.trajectory is not None
    records[1] = msgspec.structs.replace(records[1], sampling_mask=records[1].sampling_mask[:-4] + b"\1\0\0\0")
    told = f"{records[1].completion_id}: the record holds another sampling mask than its certificate says"
    rows = [row for row in rows_of(result_of(records)) if records[1].completion_id == row.last_completion_id]
    assert [row.sampling_mask and row.sampling_mask.missing for row in rows] == [told]
    found = [one for one in audit(whole.trajectory, records).violations if one.rule == "masks"]
    assert [one.message.partition(": ")[2] for one in found] == [told]
    with pytest.raises(InvalidGroup, match="cannot be trained with its sampling masks"):
        trainer_rows(Group("t1", (result_of(records),)), 1, temperature=TEMPERATURE, replays_masks=True)


# -- SGLang ------------------------------------------------------------------------------------------------------------


def _sglang(kind: str, url: str) -> Any:
    return SglangEngine(url) if kind == "chat" else GenerateEngine(EngineHttp(url), TemplateText(TinyTokenizer()))


@pytest.mark.parametrize("kind", ["chat", "generate"])
async def test_sglangs_masks_come_with_the_logprobs_among_them(kind: str) -> None:
    fake = FakeSglang(has_masks=True, largest_mask=64)
    async with (
        sglang_server(fake) as url,
        proxied_engine(_sglang(kind, url), sampling_masks=True, sampling=CUT) as running,
    ):
        await talk(running, "hello", "more")
        result = result_of(running.journal.completions)
    for completion in result.completions:
        ids = completion.sampled_ids.tolist()
        evidence = completion.certificate.sampling_mask
        assert evidence is not None
        assert evidence.mask(completion.sampling_mask).sets() == [[one, max(one - 1, 0), one + 1] for one in ids]
        assert set(completion.logprobs.tolist()) == {-0.125}
        assert completion.certificate.logprobs == "processed"
    assert len(trainer_rows(Group("t1", (result,)), 1, temperature=TEMPERATURE, replays_masks=True)) == 1


@pytest.mark.parametrize("kind", ["chat", "generate"])
async def test_sglang_is_asked_for_no_mask_where_nothing_is_cut_away(kind: str) -> None:
    fake = FakeSglang(has_masks=True, largest_mask=64)
    async with (
        sglang_server(fake) as url,
        proxied_engine(_sglang(kind, url), sampling_masks=True, sampling=WHOLE) as running,
    ):
        await talk(running, "hello")
        (completion,) = running.journal.completions
    assert completion.certificate.logprobs == "temperature_scaled"
    assert completion.certificate.sampling_mask is None
    assert "return_sampling_mask" not in fake.bodies[-1]


@pytest.mark.parametrize("fake", [FakeSglang(), FakeSglang(has_masks=True, largest_mask=0)], ids=["older", "refuses"])
async def test_an_sglang_without_masks_is_refused_and_still_probed(fake: FakeSglang) -> None:
    async with (
        sglang_server(fake) as url,
        proxied_engine(SglangEngine(url), sampling_masks=True, sampling=CUT) as running,
    ):
        assert (await running.engine.capabilities()).evidence == frozenset()
        with pytest.raises(openai.APIStatusError, match="reports none"):
            await talk(running, "hello")


ODD: dict[str, tuple[Change, str]] = {
    "lacks the sampled id": (
        lambda kept: [[one[0] + 1] for one in kept],
        "sampled token 0 is 40, which its mask does not keep",
    ),
    "keeps none": (lambda kept: [kept[0], [], *kept[2:]], "sampled token 1 is 263, which its mask does not keep"),
    "keeps one twice": (
        lambda kept: [kept[0], kept[1] + kept[1][:1], *kept[2:]],
        "the mask of sampled token 1 keeps an id twice",
    ),
    "keeps a strange id": (lambda kept: [*kept[:-1], [*kept[-1], 151936]], "outside of the vocabulary"),
}


@pytest.mark.parametrize(("change", "why"), ODD.values(), ids=ODD)
async def test_an_odd_mask_makes_its_turn_untrainable_and_no_other(change: Change, why: str) -> None:
    result = await _sglang_talk(_OddSglang(change), "hello", "more")
    whole, odd = result.completions
    assert odd.certificate.sampling_mask is not None
    assert why in (odd.certificate.sampling_mask.refused or "")
    assert odd.sampling_mask == b""
    assert result.trajectory is not None
    ((left_out, num),) = audit(result.trajectory, result.completions).left_out.items()
    assert f"cannot be replayed ({odd.certificate.sampling_mask.refused})" in left_out
    assert num == len(odd.sampled_ids)
    (exported,) = rows_of(result)
    assert exported.sampling_mask is not None
    assert why in (exported.sampling_mask.missing or "")
    (row,) = trainer_rows(Group("t1", (result,)), 1, temperature=TEMPERATURE, replays_masks=True)
    assert row.sampling_mask is not None
    assert row.loss_mask.tolist() == (row.sampling_mask.counts > 0).tolist()
    assert row.loss_mask.sum() == len(whole.sampled_ids)


async def test_a_longer_mask_is_not_cut_to_fit_at_a_stop_string() -> None:
    async with (
        sglang_server(_OddSglang(lambda kept: [*kept, [1]], from_reply=1)) as url,
        proxied_engine(_sglang("generate", url), sampling_masks=True, sampling=CUT) as running,
        running.client() as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model="m", messages=messages, stop=["SGL"])
        (completion,) = running.journal.completions
    assert len(completion.sampled_ids) == 7
    assert completion.certificate.sampling_mask is not None
    assert completion.certificate.sampling_mask.refused == "the mask is of 8 tokens, and 7 were sampled"


async def test_a_call_that_the_engine_aborts_before_a_token_has_no_mask_to_report() -> None:
    result = await _sglang_talk(_AbortingSglang(has_masks=True), "hello")
    (completion,) = result.completions
    assert completion.certificate.finish_reason == "abort"
    assert completion.certificate.untrainable == "no sampled ids"


async def test_rows_of_a_result_without_its_records_say_that_the_masks_are_missing() -> None:
    result = await _sglang_talk(FakeSglang(has_masks=True), "hello")
    (row,) = rows_of(msgspec.structs.replace(result, completions=()))
    assert row.sampling_mask is not None
    assert "is not among the session's completions" in (row.sampling_mask.missing or "")


async def _sglang_talk(fake: FakeSglang, *texts: str) -> SessionResult:
    async with (
        sglang_server(fake) as url,
        proxied_engine(SglangEngine(url), sampling_masks=True, sampling=CUT) as running,
    ):
        await talk(running, *texts)
        return result_of(running.journal.completions)


class _OddSglang(FakeSglang):
    """Changes the masks of replies; of those that are longer than a probe's."""

    def __init__(self, change: Change, from_reply: int = 2) -> None:
        super().__init__(has_masks=True)
        self._change = change
        self._num_before = from_reply - 1

    def _masks(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        found = super()._masks(body, ids)
        if len(ids) == 1:
            return found
        if self._num_before:
            self._num_before -= 1
            return found
        kept = self._change(found["output_token_sampling_mask"])
        return found | {
            "output_token_sampling_mask": kept,
            "output_token_sampling_logprobs": [-0.125] * len(kept),
        }


class _AbortingSglang(FakeSglang):
    def _choice(self, index: int, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        found = super()._choice(index, body, prompt)
        if body.get("max_tokens") == 1:
            return found
        return found | {"response_token_ids": [], "finish_reason": "abort", "meta_info": {"output_token_logprobs": []}}


# -- experts on vLLM's route of ids ------------------------------------------------------------------------------------


async def test_vllms_route_of_ids_reports_experts_too() -> None:
    fake = FakeMoeVllm()
    async with (
        moe_server(fake) as url,
        proxied_engine(generate_engine(url), routed_experts=True) as running,
    ):
        await talk(running, "hello", "more")
        result = result_of(running.journal.completions)
    (row,) = rows_of(result)
    assert row.routed_experts is not None
    want = fake.routing.of([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
    assert np.array_equal(row.routed_experts.array(), want)
    starts = [body["sampling_params"].get("routed_experts_prompt_start") for body in fake.bodies]
    assert starts == [None, result.completions[1].prompt_shared - 1]
    assert json.dumps(fake.bodies)  # plain JSON: nothing of NumPy got into a request
