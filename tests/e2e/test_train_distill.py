"""`gangline train run` with a teacher: the policy comes nearer to it, and what cannot be compared is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gangline.models.engine_server.app import create_app, serving
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.train.runs.log import read_records
from support.engines.byte_model import write_byte_model
from support.engines.models import reference_model
from support.sdk.talking_agent import tasks
from support.service.cli_process import COMMAND, clean_environment, processes_with

NUM_STEPS = 12


@asynccontextmanager
async def teaching(folder: Path) -> AsyncGenerator[str]:
    model = LanguageModel(load_model(folder))
    sampler = EmbeddedSampler(model, load_tokenizer(folder), model_name="teacher", threads=1)
    try:
        async with serving(create_app(sampler)) as url:
            yield url
    finally:
        await sampler.close()


def spec(folder: Path, url: str, **changes: Any) -> Path:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in islice(tasks(), 6)))
    document: dict[str, Any] = {
        "name": "distilled",
        "model": str(folder / "model"),
        "algorithm": {"name": "distill"},
        "teacher": {"url": url},
        "data": {"tasks": "tasks.jsonl", "num_samples": 8, "seeded": True},
        "schedule": {"mode": "sync", "steps": NUM_STEPS, "groups_per_step": 4, "patience_s": 5},
        "learner": {"learning_rate": 1e-2, "reference_metric": False},
        "service": {"node": {"sampling": {"temperature": {"override": 1.0}}}},
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


async def train(path: Path, data: Path) -> tuple[int, str]:
    command = (*COMMAND, "train", "run", str(path), "--data", str(data), "--json")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=clean_environment())
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


def divergence(student: Path, teacher: Path) -> float:
    """KL(student || teacher) in nats a token, over the whole vocabulary, on texts of the student's own."""
    policy, other = reference_model(student), reference_model(teacher)
    torch.manual_seed(0)
    ids = torch.tensor([load_tokenizer(student).encode("<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n")])
    found = list[float]()
    with torch.inference_mode():
        rows = ids.repeat(64, 1)
        for _ in range(6):
            mine = policy(rows).logits[:, -1].log_softmax(-1)
            theirs = other(rows).logits[:, -1].log_softmax(-1)
            found.append(float((mine.exp() * (mine - theirs)).sum(-1).mean()))
            rows = torch.cat([rows, mine.exp().multinomial(1)], 1)
    return float(np.mean(found))


async def test_a_policy_comes_nearer_to_its_teacher_without_any_reward(tmp_path: Path) -> None:
    student = write_byte_model(tmp_path / "model", seed=0, initializer_range=0.05)
    teacher = write_byte_model(tmp_path / "teacher", seed=1, initializer_range=0.2)
    async with teaching(teacher) as url:
        code, errors = await train(spec(tmp_path, url), tmp_path / "data")
    assert code == 0, errors
    run = tmp_path / "data" / "runs" / "distilled"
    records = read_records(run / "metrics.jsonl")
    assert [record.version for record in records] == list(range(1, NUM_STEPS + 1)), "every group taught"
    first, last = (float(np.mean([one.learner["teacher_kl"] for one in part])) for part in (records[:3], records[-3:]))
    before, after = divergence(student, teacher), divergence(run / "model", teacher)
    assert after < 0.85 * before
    assert last < 0.85 * first
    assert processes_with(str(tmp_path / "data")) == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"service": {}}, "sampled at temperature 0.8"),
        ({"teacher": {"url": "http://127.0.0.1:9"}}, "did not answer"),
    ],
    ids=["another temperature", "no teacher"],
)
async def test_what_cannot_be_compared_ends_the_run(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_byte_model(tmp_path / "model")
    async with teaching(tmp_path / "model") as url:
        code, errors = await train(spec(tmp_path, url, **changes), tmp_path / "data")
    assert code != 0
    assert says in errors
    assert "Traceback" not in errors


async def test_a_teacher_with_other_ids_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_byte_model(tmp_path / "model")
    async with teaching(write_byte_model(tmp_path / "teacher", backwards=True)) as url:
        code, errors = await train(spec(tmp_path, url), tmp_path / "data")
    assert code == 2
    assert "another vocabulary" in errors
    assert not read_records(tmp_path / "data" / "runs" / "distilled" / "metrics.jsonl")
