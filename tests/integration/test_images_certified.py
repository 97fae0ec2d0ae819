"""Images, against a real vision model: pixels are certified, and log-probs are computed again from the row alone."""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoConfig
from transformers.models.qwen2_vl import Qwen2VLModel

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Image
from gangline.domain.errors import InvalidGroup
from gangline.domain.image_files import PixelsMissing, file_of, image_files, image_problems, placed_images
from gangline.domain.images import ImageEvidence
from gangline.domain.session import HarnessExit, SessionResult
from gangline.domain.tokens import encode_json, token_ids
from gangline.domain.trajectory import Trace, Trajectory
from gangline.models.engines.generate.routes import generate_engine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.vision import ImageReader
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.rows.audit import audit
from gangline.rows.export import export_rows
from gangline.rows.parquet import read_parquet
from gangline.rows.rewards import apply_reward
from gangline.rows.rows import Row, rows_of
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.settings.plugins import make_builder
from gangline.tasks.check_rows.kinds import Finding
from gangline.tasks.check_rows.row_forms import gangline_rows
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm
from gangline.train.trainers.contract import rows_of as trainer_rows
from gangline.train.trainers.miles import MilesRollout
from gangline.train.trainers.prime_rl import samples as prime
from gangline.train.trainers.slime.rollout import GroupRollouts, SlimeRollout
from gangline.train.trainers.slime.samples import to_samples as slime_samples
from support.engines.picture_talks import DIALECTS, Picture, Step, generated, transparent
from support.engines.tiny_vision import IMAGE_ID, write_model
from support.engines.vision_engine import VisionEngine, logprobs_of, vision_engine
from support.node.proxy import MemoryJournal, served
from support.slime.types import Sample as SlimeSample
from support.training.verl_loops import agent_loops

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

NUM_CONVERSATIONS = int(os.environ.get("GANGLINE_IMAGE_CONVERSATIONS", "20"))
"""For each dialect and route; 200 take five minutes of processor time, and are what docs/guides/vision.md tells of."""
ROUTES = ("ids", "messages")
"""Stitched on vLLM's route of ids; observed on its chat route."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / "model")


@dataclass
class Node:
    url: str
    proxy: Proxy
    engine: Any
    seeing: VisionEngine
    script: list[str]
    num_sessions: int = 0

    async def talk(self, dialect: str, steps: Sequence[Step]) -> list[Completion]:
        """Its own session. Raises: the SDK's error."""
        self.num_sessions += 1
        session_id, journal = f"s{self.num_sessions}", MemoryJournal()
        self.script[:] = [step.reply for step in steps]
        spec = SessionSpec(session_id=session_id, attempt=1, key="gls-right", retry_grace_s=0.0)
        session = ModelSession(spec, self.engine, journal)
        self.proxy.add(session)
        client = DIALECTS[dialect](self.url, session_id, "gls-right")
        try:
            for step in steps:
                await client.step(step.text, step.pictures)
        finally:
            await client.close()
            await session.fence("the test is over")
        return journal.completions


@asynccontextmanager
async def node(folder: Path, route: str) -> AsyncGenerator[Node]:
    script: list[str] = []
    seeing = VisionEngine(folder, lambda: script.pop(0))
    proxy = Proxy()
    async with vision_engine(seeing) as engine_url, served(proxy) as url:
        if route == "ids":
            engine: Any = generate_engine(engine_url, parsers={"tools": "hermes"}, processor=str(folder))
        else:
            engine = VllmEngine(engine_url, processor=str(folder))
        try:
            await engine.probe()
            yield Node(url, proxy, engine, seeing, script)
        finally:
            await engine.close()


def built(completions: Sequence[Completion], strategy: str = "prefix_merging") -> Trajectory:
    return make_builder(strategy, {}).build(CompletionTree(completions), session_id="s1", task_id="t1")


def result_of(trajectory: Trajectory, completions: Sequence[Completion]) -> SessionResult:
    return SessionResult(
        session_id="s1",
        task_id="t1",
        node_id="n1",
        attempt=1,
        fence=1,
        outcome="completed",
        failure=None,
        reward=1.0,
        reward_details={},
        harness_exit=HarnessExit(exit_code=0),
        trajectory=apply_reward(trajectory, Reward(reward=1.0)),
        completions=tuple(completions),
        timings=(),
        artifacts={},
    )


def worst_difference(model: Any, reader: ImageReader, trace: Trace | Row) -> float:
    """Of log-probs computed again from the trace alone: its ids, and the files in its messages."""
    return difference(model, trace, reader.pixels(image_files(trace)) if placed_images(trace) else {})


def difference(model: Any, trace: Trace | Row, pixels: dict[str, Any]) -> float:
    ids = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
    again = np.array(logprobs_of(model, ids, pixels, len(trace.response_ids)))
    on = trace.loss_mask == 1
    return float(np.abs(again - trace.response_logprobs)[on].max())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("route", ROUTES)
async def test_generated_conversations_with_images_are_certified_and_computed_again(
    model_folder: Path, dialect: str, route: str
) -> None:
    chance, reader = random.Random(f"{dialect} {route}"), ImageReader.load(model_folder)
    worst, sources = 0.0, set[str]()
    async with node(model_folder, route) as running:
        for _ in range(NUM_CONVERSATIONS):
            steps = generated(chance)
            completions = await running.talk(dialect, steps)
            assert len(completions) == len(steps)
            assert {one.certificate.untrainable for one in completions} == {None}
            num_shown = 0
            for step, one in zip(steps, completions, strict=True):
                num_shown += len(step.pictures)
                evidence = one.certificate.images
                placed = () if evidence is None else evidence.placed
                assert len(placed) == num_shown
                if placed:
                    sources.add(f"{one.certificate.context} {one.certificate.prompt_source}")
            trajectory = built(completions)
            assert audit(trajectory, completions).violations == ()
            worst = max(worst, *(worst_difference(running.seeing.model, reader, one) for one in trajectory.traces))
    assert worst < 1e-5
    if route == "ids":
        assert sources == {"first rendered", "exact stitched"}
        assert running.seeing.num_generated > 2 * NUM_CONVERSATIONS
    else:
        assert {source.split()[1] for source in sources} == {"engine"}


def shown(red: int, size: tuple[int, int] = (56, 56)) -> Picture:
    out = io.BytesIO()
    Pillow.new("RGB", size, (red, 10, 200)).save(out, "PNG")
    return Picture("image/png", out.getvalue())


TALK = (
    Step("Look.", (), '<tool_call>\n{"name": "shot", "arguments": {"of": "it"}}\n</tool_call>'),
    Step("Here.", (shown(1),), "A red dog."),
    Step("And now?", (shown(200),), "A blue one, and it sleeps."),
)


@pytest.mark.parametrize("strategy", ["prefix_merging", "per_request", "tree"])
async def test_rows_of_every_builder_have_their_pixels_after_a_file(
    model_folder: Path, tmp_path: Path, strategy: str
) -> None:
    reader = ImageReader.load(model_folder)
    async with node(model_folder, "ids") as running:
        completions = await running.talk("chat", TALK)
        trajectory = built(completions, strategy)
        assert audit(trajectory, completions).ok
        result = result_of(trajectory, completions)
        path = export_rows([result], tmp_path, name="rows", format="parquet")
        rows = list(with_whole_prompts(read_parquet(path)))
        assert [encode_json(row) for row in rows] == [encode_json(row) for row in with_whole_prompts(rows_of(result))]
        assert [len(placed_images(row)) for row in rows] == ([2] if strategy != "per_request" else [0, 1, 2])
        for row in rows:
            assert row.untrainable is None
            assert worst_difference(running.seeing.model, reader, row) < 1e-5


async def test_without_the_pixels_or_with_others_the_log_probs_are_not_those_that_were_recorded(
    model_folder: Path,
) -> None:
    reader = ImageReader.load(model_folder)
    async with node(model_folder, "ids") as running:
        trace = built(await running.talk("chat", TALK)).traces[0]
        files = image_files(trace)
        assert difference(running.seeing.model, trace, reader.pixels(files)) < 1e-5
        assert difference(running.seeing.model, trace, reader.pixels(files[::-1])) > 1e-2
        assert difference(running.seeing.model, trace, {}) > 1e-2


async def test_equal_ids_of_other_pixels_are_no_common_chain(model_folder: Path) -> None:
    async with node(model_folder, "ids") as running:
        completions = await running.talk("chat", TALK)
    first, *others = completions[1].certificate.images.placed  # pyright: ignore[reportOptionalMemberAccess]
    swapped = msgspec.structs.replace(first, digest="0" * 64)
    evidence = ImageEvidence(placed=(swapped, *others))
    certificate = msgspec.structs.replace(completions[1].certificate, images=evidence)
    completions[1] = msgspec.structs.replace(completions[1], certificate=certificate)
    assert [len(trace.spans) for trace in built(completions).traces] == [2, 1]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_picture_that_engines_read_differently_is_refused_by_name(model_folder: Path, dialect: str) -> None:
    steps = [Step("What is it?", (transparent(),), "A dog.")]
    async with node(model_folder, "messages") as running:
        (completion,) = await running.talk(dialect, steps)
        assert completion.certificate.untrainable == "images"
        evidence = completion.certificate.images
        assert evidence is not None
        assert "transparent" in str(evidence.refused)
        assert not built([completion]).traces[0].loss_mask.any()
    async with node(model_folder, "ids") as running:
        with pytest.raises(Exception, match="transparent"):
            await running.talk(dialect, steps)


def test_a_literal_placeholder_in_a_text_is_refused_by_name(model_folder: Path) -> None:
    reader, image = ImageReader.load(model_folder), Image(shown(3).url)
    prompt = token_ids([1, IMAGE_ID, 2, *[IMAGE_ID] * 4, 3])
    assert reader.evidence([image], prompt).refused == "1 images were sent, and the prompt has placeholders of 2"
    assert reader.evidence([image], prompt[2:]).refused is None
    assert reader.evidence([image], prompt[4:]).refused == (
        "image 0 has 3 placeholder ids in the prompt, and 4 by the processor"
    )


async def test_a_row_whose_files_are_gone_or_swapped_says_so(model_folder: Path) -> None:
    async with node(model_folder, "ids") as running:
        trace = built(await running.talk("chat", TALK)).traces[0]
    assert list(image_problems(trace)) == []
    without = msgspec.structs.replace(trace, response_messages=trace.response_messages[:2])
    assert list(image_problems(without)) == ["2 images are certified, its messages have 1"]
    with pytest.raises(PixelsMissing, match="2 images are certified, its messages have"):
        image_files(without)
    certificate = trace.certificates[-1]
    placed = placed_images(trace)
    swapped = msgspec.structs.replace(certificate, images=ImageEvidence(placed=placed[::-1], processor="p"))
    other = msgspec.structs.replace(trace, certificates=(*trace.certificates[:-1], swapped))
    with pytest.raises(PixelsMissing, match="image 0 is another file"):
        image_files(other)
    assert "turn 1 was conditioned on other images than the row has" in list(image_problems(other))
    assert "image 0 does not stand where its certificate says" in list(image_problems(other))


def findings_of(row: dict[str, Any]) -> list[Finding]:
    (sample,) = gangline_rows(row, 1)
    return sample.findings


async def test_check_rows_finds_pixels_that_are_gone(model_folder: Path) -> None:
    async with node(model_folder, "ids") as running:
        completions = await running.talk("chat", TALK)
    (row,) = rows_of(result_of(built(completions), completions))
    whole = json.loads(encode_json(row))
    assert [finding.kind for finding in findings_of(whole)] == []
    gone = copy.deepcopy(whole)
    gone["response_messages"] = gone["response_messages"][:2]
    assert [finding.kind for finding in findings_of(gone)] == ["pixels_missing"]
    bare = copy.deepcopy(whole)
    for certificate in bare["certificates"]:
        certificate["images"] = None
    assert [finding.kind for finding in findings_of(bare)] == ["pixels_missing"]


async def test_a_trainer_that_carries_no_pixels_refuses_the_row(model_folder: Path) -> None:
    async with node(model_folder, "ids") as running:
        completions = await running.talk("chat", TALK)
    group = Group("t1", (result_of(built(completions), completions),) * 1)
    with pytest.raises(InvalidGroup, match="pixels would be left behind"):
        trainer_rows(group, 1)
    assert len(trainer_rows(group, 1, takes_images=True)) == 1


def _rollouts(
    reader: ImageReader, folder: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[], Any]]:
    """The rollouts of slime and of miles, over a group that is there."""

    def collect(*_: Any) -> list[Group]:
        return [group]

    monkeypatch.setattr(GroupRollouts, "collect", collect)
    arguments = SimpleNamespace(
        n_samples_per_prompt=2, rollout_temperature=1.0, advantage_estimator="grpo", rewards_normalization=True
    )

    class Miles(MilesRollout):
        sample_type = SlimeSample
        output_type = SimpleNamespace

        def groups(self) -> GroupRollouts:
            return GroupRollouts("http://127.0.0.1:9", dict, folder)

    Miles.reader = reader
    slime = SlimeRollout("http://127.0.0.1:9", dict, folder, sample_type=SlimeSample, reader=reader)
    miles = Miles(SimpleNamespace(args=arguments, data_source=None))
    asked = SimpleNamespace(evaluation=False, weight_version=None)
    return [lambda: slime(arguments, 0, None), lambda: miles(asked).samples]  # pyright: ignore[reportArgumentType]


async def test_slime_gets_the_processed_pixels_and_prime_rl_the_files(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ImageReader.load(model_folder)
    async with node(model_folder, "ids") as running:
        completions = await running.talk("chat", TALK)
        result = result_of(built(completions), completions)
        other = msgspec.structs.replace(result, session_id="s2", reward=0.0)
        group = Group("t1", (result, other))
        with pytest.raises(InvalidGroup, match="pixels would be left behind"):
            slime_samples([group], 2, sample_type=SlimeSample)
        [[[sample], _]] = slime_samples([group], 2, sample_type=SlimeSample, reader=reader)
        for rollout in _rollouts(reader, tmp_path, group, monkeypatch):
            [[[its], _]] = rollout()
            assert torch.equal(
                its.multimodal_train_inputs["pixel_values"], sample.multimodal_train_inputs["pixel_values"]
            )
        again = logprobs_of(running.seeing.model, sample.tokens, sample.multimodal_train_inputs, sample.response_length)
        on = np.array(sample.loss_mask) == 1
        assert np.abs(np.array(again) - sample.rollout_log_probs)[on].max() < 1e-5

        types = SimpleNamespace(TrainingSample=SimpleNamespace, MMRefs=SimpleNamespace, MMImageRef=SimpleNamespace)

        def prime_rl(_module: str) -> Any:
            return types

        monkeypatch.setattr(prime, "prime_rl", prime_rl)
        settings = prime.PrimeSettings(num_samples=2, groups_per_step=1, seq_len=4096, max_steps=1)
        made = prime.to_samples([group], settings, Algorithm())[0].training_sample
        placed = placed_images(built(completions).traces[0])
        assert [(one.offset, one.length) for one in made.mm_refs.images] == [(at.start, at.length) for at in placed]
        for one in made.mm_refs.images:
            assert made.mm_token_type_ids[one.offset : one.offset + one.length] == [1] * one.length
        assert sum(made.mm_token_type_ids) == sum(one.length for one in made.mm_refs.images)
        assert [file_of(Image(one.url)) for one in made.mm_refs.images] == [shown(1).data, shown(200).data]


async def test_a_placeholder_that_was_sampled_is_not_trained_on(model_folder: Path) -> None:
    async with node(model_folder, "ids") as running:
        (completion,) = await running.talk("chat", [Step("Look.", (shown(1),), "A <|image_pad|> dog.")])
    assert IMAGE_ID in completion.sampled_ids.tolist()
    assert completion.certificate.untrainable == "images"


def _as_verl_binds(folder: Path) -> SimpleNamespace:
    """verl's processor, as far as positions go: `hf_processor` needs torchvision, and binds the model's own functions.

    Compared with verl 0.9.1 (`utils/tokenizer/tokenizer.py`) on 2026-11-27.
    """
    processor = SimpleNamespace(config=AutoConfig.from_pretrained(folder), image_token_id=IMAGE_ID)
    for name in ("get_rope_index", "get_vision_position_ids"):
        if hasattr(Qwen2VLModel, name):
            setattr(processor, name, MethodType(getattr(Qwen2VLModel, name), processor))
    return processor


async def test_verl_gets_the_pixels_and_the_positions_of_its_own_agent_loops(
    model_folder: Path, tmp_path: Path
) -> None:
    verl = pytest.importorskip("gangline.train.trainers.verl.batches", exc_type=ImportError)
    reader, processor = ImageReader.load(model_folder), _as_verl_binds(model_folder)
    async with node(model_folder, "ids") as running:
        seen = await running.talk("chat", TALK)
        blind = await running.talk("chat", [Step("Hello.", (), "Hi.")])
        with_images = result_of(built(seen), seen)
        without = msgspec.structs.replace(result_of(built(blind), blind), session_id="s2")
        group = Group("t1", (with_images, without))
        with pytest.raises(InvalidGroup, match="pixels would be left behind"):
            verl.to_data_proto([group], 2)
        made = verl.to_data_proto([group], 2, reader=reader, processor=processor, prompt_length=400)
        first, _ = made.non_tensor_batch["multi_modal_inputs"]
        assert made.non_tensor_batch["multi_modal_inputs"][1] == {}
        assert made.batch["position_ids"].shape == (2, 4, made.batch["input_ids"].shape[1])
        with agent_loops(tmp_path) as loops:
            compute = loops.AgentLoopWorker._compute_position_ids
            for number, inputs in enumerate(made.non_tensor_batch["multi_modal_inputs"]):
                ids, mask = (made.batch[name][number : number + 1] for name in ("input_ids", "attention_mask"))
                theirs = compute(
                    SimpleNamespace(processor=processor), ids, mask, dict(inputs) | {"mm_token_type_ids": ids}
                )
                assert torch.equal(made.batch["position_ids"][number : number + 1], theirs)
        is_there = made.batch["attention_mask"][0].bool()
        width = made.batch["responses"].shape[1]
        with torch.inference_mode():
            logits = running.seeing.model(
                input_ids=made.batch["input_ids"][:1, is_there],
                position_ids=made.batch["position_ids"][:1, 1:, is_there].transpose(0, 1),
                pixel_values=first["pixel_values"],
                image_grid_thw=first["image_grid_thw"],
            ).logits[0]
        again = torch.log_softmax(logits[-1 - width : -1].float(), -1)
        again = again.gather(1, made.batch["responses"][0][:, None])[:, 0]
        on = made.batch["response_mask"][0].bool()
        assert (again - made.batch["rollout_log_probs"][0])[on].abs().max() < 1e-5
        assert first["images_seqlens"].sum() == first["pixel_values"].shape[0]
