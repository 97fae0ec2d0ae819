"""A kind of evidence that a plug-in brings, from an engine's reply to a row's column (`examples/token_entropy`)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack
from gangline.domain.trajectory import Trace
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.audit import audit
from gangline.rows.parquet import read_parquet, write_parquet
from gangline.rows.rows import Row, read_jsonl, read_msgpack, rows_of, write_jsonl, write_msgpack
from gangline.settings import plugins
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from support.engines.expert_engines import FakeMoeVllm, moe_server
from support.engines.expert_talks import result_of, talk
from support.node.proxy import Proxied, proxied_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "token_entropy"
KIND = "token_entropy"
FORMATS = {
    "jsonl": (write_jsonl, read_jsonl),
    "msgpack": (write_msgpack, read_msgpack),
    "parquet": (write_parquet, read_parquet),
}


@dataclass
class EntropicVllm(FakeMoeVllm):
    reports_entropy: bool = True
    lost: int = 0
    """Numbers that each reply lacks; a probe's lacks none."""
    strips_entropy: bool = False

    def _reply(
        self, body: dict[str, Any], prompt: list[int], ids: list[int], text: str, finish_reason: str
    ) -> dict[str, Any]:
        found = super()._reply(body, prompt, ids, text, finish_reason)
        strips = self.strips_entropy and len(ids) > 1
        if self.reports_entropy and body.get("return_token_entropy") and not body.get("stream") and not strips:
            for choice in found["choices"]:
                lost = self.lost if len(ids) > 1 else 0
                choice["token_entropies"] = [entropy(one) for one in ids[: len(ids) - lost]]
        return found


def entropy(token_id: int) -> float:
    return token_id / 8


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, as an installed distribution."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (metadata := tmp_path / "site" / "gangline_token_entropy-0.1.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gangline-token-entropy\nVersion: 0.1\n")
    points = [f"[gangline.evidence]\n{k} = {v}\n" for k, v in project["entry-points"]["gangline.evidence"].items()]
    (metadata / "entry_points.txt").write_text("".join(points))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr(plugins, "_installed", cache(plugins._installed.__wrapped__))


@asynccontextmanager
async def talked(fake: EntropicVllm, *texts: str, **options: Any) -> AsyncGenerator[Proxied]:
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), **({"evidence": (KIND,)} | options)) as running:
        await talk(running, *texts)
        yield running


async def _result(fake: EntropicVllm, *texts: str, **options: Any) -> SessionResult:
    async with talked(fake, *texts, **options) as running:
        return result_of(running.journal.completions)


def _values(row: Row) -> list[Any]:
    assert row.evidence
    assert row.evidence[KIND].missing is None
    return row.evidence[KIND].values


@pytest.mark.usefixtures("installed")
async def test_a_plug_ins_numbers_reach_the_row_through_journal_audit_and_every_format(tmp_path: Path) -> None:
    fake = EntropicVllm(texts=["one two", "three"])
    journal = Journal.open(tmp_path / "journal")
    await journal.open_attempt(AttemptOpened("s1", 1, "t1", 1))
    async with talked(fake, "hello", "more", journal=journal) as running:  # the second turn streams
        assert not any(one.evidence for one in running.session.tree)
    await journal.close()
    reopened = Journal.open(tmp_path / "journal")
    result = result_of(await reopened.read(AttemptKey("s1", 1)))
    await reopened.close()
    assert [body.get("return_token_entropy") for body in fake.bodies] == [True, True]
    (row,) = rows_of(result)
    assert _values(row) == [
        entropy(token) if is_sampled else None
        for token, is_sampled in zip(row.response_ids.tolist(), row.loss_mask.tolist(), strict=True)
    ]
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).violations == ()
    for suffix, (write, read) in FORMATS.items():
        write([row], tmp_path / f"rows.{suffix}")
        (again,) = read(tmp_path / f"rows.{suffix}")
        assert again.evidence == row.evidence
    assert decode_msgpack(encode_msgpack(result), SessionResult).completions[0].evidence == (
        result.completions[0].evidence
    )


@pytest.mark.usefixtures("installed")
async def test_evidence_changes_no_other_field_of_the_row() -> None:
    with_it = await _result(EntropicVllm(texts=["one two", "three"]), "hello", "more")
    without = await _result(EntropicVllm(texts=["one two", "three"]), "hello", "more", evidence=())
    (row,), (plain,) = rows_of(with_it), rows_of(without)
    assert not plain.evidence
    for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
        assert np.array_equal(getattr(row, name), getattr(plain, name))


@pytest.mark.usefixtures("installed")
async def test_it_goes_with_the_built_in_kinds() -> None:
    fake = EntropicVllm(texts=["one two", "three"])
    (row,) = rows_of(await _result(fake, "hello", "more", routed_experts=True))
    assert row.routed_experts is not None
    want = fake.routing.of([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
    assert np.array_equal(row.routed_experts.array(), want)
    assert len(_values(row)) == len(row.response_ids)


@pytest.mark.usefixtures("installed")
async def test_an_engine_that_does_not_report_it_is_refused_before_it_samples() -> None:
    fake = EntropicVllm(reports_entropy=False)
    async with moe_server(fake) as url, proxied_engine(VllmEngine(url), evidence=(KIND,)) as running:
        with pytest.raises(openai.APIStatusError, match=r"capture\.evidence asks for the entropy of each token"):
            await talk(running, "hello")
        assert running.journal.completions == []


@pytest.mark.usefixtures("installed")
async def test_a_reply_that_lost_it_is_refused() -> None:
    with pytest.raises(openai.APIError, match="returned no token entropies"):
        await _result(EntropicVllm(strips_entropy=True), "hello")


@pytest.mark.usefixtures("installed")
async def test_numbers_of_fewer_tokens_are_not_known_and_the_turn_is_trained_on_as_before(tmp_path: Path) -> None:
    result = await _result(EntropicVllm(lost=1), "hello")
    (row,) = rows_of(result)
    assert row.evidence
    num = len(result.completions[0].sampled_ids)
    why = f"token entropies of shape ({num - 1},), and {num} tokens"
    assert row.evidence[KIND].missing == f"{row.last_completion_id}: {why}"
    assert row.loss_mask.any()
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).violations == ()
    write_parquet([row], tmp_path / "rows")
    assert [one.evidence for one in read_parquet(tmp_path / "rows")] == [row.evidence]


@pytest.mark.usefixtures("installed")
async def test_other_bytes_than_the_certified_ones_are_found() -> None:
    result = await _result(EntropicVllm(), "hello")
    (record,) = result.completions
    harmed = msgspec.structs.replace(record, evidence={KIND: bytes(len(record.data_of(KIND)))})
    (row,) = rows_of(msgspec.structs.replace(result, completions=(harmed,)))
    told = f"{record.completion_id} holds other token entropies than its certificate says"
    assert row.evidence
    assert row.evidence[KIND].missing == told
    assert result.trajectory is not None
    (found,) = audit(result.trajectory, [harmed]).violations
    assert (found.rule, found.message) == (KIND, f"s1.t0: {told}")


async def test_where_the_plug_in_is_not_installed_rows_say_so_and_parquet_keeps_it(
    tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await _result(EntropicVllm(), "hello")
    with monkeypatch.context() as without:
        without.setattr(plugins, "_installed", lambda: {"evidence": []})
        (row,) = rows_of(result)
        assert row.evidence
        assert row.evidence[KIND].missing == f"the plug-in of evidence {KIND!r} is not installed here"
        write_parquet([row], tmp_path / "rows")
        assert [one.evidence for one in read_parquet(tmp_path / "rows")] == [row.evidence]
        plain = msgspec.structs.replace(row, evidence=msgspec.UNSET)
        many = [plain] * 256 + [row]  # a second group, behind a file that was begun without the column
        with pytest.raises(InvalidRequest, match="evidence of a plug-in"):
            write_parquet(many, tmp_path / "later")
    assert _values(rows_of(result)[0])


async def test_without_plug_ins_records_and_rows_are_written_as_ever(tmp_path: Path) -> None:
    result = await _result(EntropicVllm(), "hello", evidence=())
    (row,) = rows_of(result)
    written = json.loads(encode_json(row))
    assert "evidence" not in written
    assert "evidence" not in written["certificates"][0]
    assert "evidence" not in json.loads(encode_json(result.completions[0]))
    write_parquet([row], tmp_path / "rows")
    assert [one.evidence for one in read_parquet(tmp_path / "rows")] == [msgspec.UNSET]


def test_a_task_that_names_an_unknown_kind_is_refused() -> None:
    task = TaskRequest.model_validate(
        {
            "task_id": "t",
            "instruction": "x",
            "agent": {"harness": "shell", "settings": {"command": "true"}},
            "evaluator": {"strategy": "session_completed"},
            "capture": {"evidence": ["token_entropie"]},
        }
    )
    with pytest.raises(UnknownPlugin, match="evidence 'token_entropie'"):
        plugins.check_task(task)


def test_a_row_has_a_field_of_each_kind_with_fields_of_its_own() -> None:
    assert {"routed_experts", "sampling_mask", "evidence"} <= set(Row.__struct_fields__)
    assert "evidence" not in Trace.__struct_fields__
