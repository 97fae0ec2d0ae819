"""examples/swe_gym for slime: its arguments by slime's and Megatron's own parsers, and a dry run by slime's loop.

    git clone https://github.com/THUDM/slime && git clone https://github.com/NVIDIA/Megatron-LM
    git -C Megatron-LM checkout 1dcf0dafa     # MEGATRON_COMMIT of slime's docker/Dockerfile
    GANGLINE_SLIME=slime GANGLINE_MEGATRON=Megatron-LM make test-trainers

Stand-ins: SGLang is absent, so its options (`--sglang-...`) are compared with those that slime's own scripts and
documents use; the GPU's generation is Hopper; a folder has only the model's `config.json`. For the dry run, those
of `support.slime.checkout` and `support.service.swe_gym`. Last run with slime at 624b824 on 2026-11-30.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.engines.trained_sglang import TrainedSglang
from support.node.node import TOKEN
from support.requirements import need_command
from support.service.swe_gym import EXAMPLE, stand_ins
from support.slime.checkout import ABSENT, parsed_arguments, slime_manager, slime_program
from support.slime.service import EngineService
from support.training.absent_modules import importable
from support.training.verl_experiment import write_model

CHECKOUT = Path(os.environ.get("GANGLINE_SLIME", ""))
MEGATRON = os.environ.get("GANGLINE_MEGATRON")
pytestmark = [
    pytest.mark.skipif("GANGLINE_SLIME" not in os.environ, reason="GANGLINE_SLIME names no checkout of slime"),
    pytest.mark.filterwarnings("ignore"),
]
# Of Qwen3.5-4B, what is compared with the arguments; by slime's scripts/models/qwen3.5-4B.sh.
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
MODEL = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TEXT}
# Megatron's, by which slime balances a batch: those of the tiny model.
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "num_layers": 2,
    "vocab_size": 520,
    "num_experts": None,
}
TABLE_4 = {
    "num_rollout": 74,  # 1 epoch of 293 tasks
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 16,
    "advantage_estimator": "grpo",
    "optimizer": "adam",
    "lr": 1e-6,
    "weight_decay": 0.1,
    "use_tis": True,
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("Qwen3.5-4B", "Qwen3.5-4B_torch_dist"):
        (tmp_path / name).mkdir()
    (tmp_path / "Qwen3.5-4B" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def words(name: str, models: Path) -> list[str]:
    """An array of `slime_arguments.sh`, by bash."""
    script = f'set -eu; source "$0"; printf "%s\\0" "${{{name}[@]}}"'
    folders = {"SLIME": str(CHECKOUT.absolute()), "MODELS": str(models), "SWE_GYM_RUN": str(models / "run")}
    command = ["bash", "-c", script, str(EXAMPLE / "slime_arguments.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | folders)
    return done.stdout.split("\0")[:-1]


def launch_variables() -> dict[str, str]:
    """Those that `slime.sh` sets to words."""
    return dict(re.findall(r"^export (\w+)=(\w+)(?=\s|$)", (EXAMPLE / "slime.sh").read_text(), re.MULTILINE))


@pytest.fixture
def whole(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """(all arguments after slime's `parse_args`, options that neither slime nor Megatron knows)"""
    if MEGATRON is None:
        pytest.skip("GANGLINE_MEGATRON names no checkout of Megatron-LM")
    absent = [name for name in ABSENT if name != "megatron"]
    unknown: list[list[str]] = []
    parse = argparse.ArgumentParser.parse_known_args

    def noting(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        found = parse(parser, *given, **named)
        unknown.append(found[1])
        return found

    for name, value in launch_variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_async.py", *words("ARGUMENTS", models)])
    # Its kernels want Triton.
    kernels = "megatron.core.transformer.custom_layers"
    with importable(MEGATRON, "six", kernels), importable(CHECKOUT, *absent):
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", noting)
        megatron = importlib.import_module("megatron.training.arguments")
        monkeypatch.setattr(megatron, "get_device_arch_version", lambda: 9)
        module = importlib.import_module("slime.utils.arguments")
        monkeypatch.setattr(module, "sglang_validate_args", vars)  # looks, and changes nothing
        args = module.parse_args()
        yield args, [word for word in min(unknown, key=len) if word.startswith("--")]


def test_slime_and_megatron_read_the_numbers_of_table_4(whole: tuple[Any, list[str]]) -> None:
    args, _ = whole
    assert {name: getattr(args, name) for name in TABLE_4} == TABLE_4
    assert (args.actor_num_gpus_per_node * args.actor_num_nodes, args.rollout_num_gpus) == (4, 4)
    assert args.world_size == 4
    assert args.global_batch_size == args.rollout_batch_size * args.n_samples_per_prompt


def test_every_option_is_known_to_one_of_them(whole: tuple[Any, list[str]], models: Path) -> None:
    """Megatron's parser ignores the others without a word. The file of the model is slime's own."""
    _, unknown = whole
    ours = set(unknown) - set(words("MODEL_ARGS", models))
    used = "".join(path.read_text() for kind in ("*.sh", "*.md") for path in CHECKOUT.rglob(kind))
    assert ours, "SGLang's are among them"
    assert [option for option in sorted(ours) if not (option.startswith("--sglang-") and option in used)] == []


def test_our_adapter_takes_them(models: Path) -> None:
    from gangline.train.trainers.slime import arguments

    with importable(CHECKOUT, *ABSENT):
        args = read(models)
    arguments.refuse_options(args, arguments.IGNORED_BY_ROLLOUTS)
    arguments.require_fitting(args)


def read(models: Path, *more: str) -> SimpleNamespace:
    """By slime's own parser; those of Megatron and SGLang are left out."""
    parse = argparse.ArgumentParser.parse_args

    def leniently(parser: argparse.ArgumentParser, given: Any = None, namespace: Any = None) -> Any:
        return parser.parse_known_args(given, namespace)[0]

    argparse.ArgumentParser.parse_args = leniently  # type: ignore[method-assign]
    try:
        return parsed_arguments(CHECKOUT, *words("ARGUMENTS", models), *more)
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]


async def test_slime_trains_on_two_generated_tasks(
    tmp_path: Path, models: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `train_async`, its data source over our prompts, the example's rollout function, a whole service."""
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    folder = tmp_path_factory.mktemp("swe_gym") / "rows"
    folder.mkdir()
    tasks, variables = await asyncio.to_thread(stand_ins, folder)
    run = models / "run"
    run.mkdir()
    prompts = [{"prompt": task["instruction"], "metadata": {"task": task}} for task in tasks]
    (run / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    write_model(models / "Qwen3.5-4B")  # a tokenizer, which its data source loads
    for name, value in {**variables, "SWE_GYM_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SWE_GYM_RUN", str(run))
    monkeypatch.setenv("SWE_GYM_PORT", "0")
    sizes = (
        "--num-rollout",
        "2",
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "4",
        "--global-batch-size",
        "8",
    )
    with importable(CHECKOUT, *ABSENT):
        args = read(models, *sizes)
        async with EngineService.running(tmp_path, TrainedSglang(reply_s=0.02)) as running:
            vars(args).update(
                offload_rollout=False,
                offload_train=False,
                over_sampling_batch_size=args.rollout_batch_size,
                use_critic=False,
                start_rollout_id=0,
                micro_batch_size=1,
                sglang_speculative_algorithm=None,
                **TINY,
                **running.address,
            )
            monkeypatch.setenv("SWE_GYM_SERVER", running.client.url)
            rollout = runpy.run_path(str(EXAMPLE / "rollout.py"))["generate_rollout"]
            source = importlib.import_module("slime.rollout.data_source").RolloutDataSource(args)
            manager = slime_manager(args, rollout, source, list(running.engines), monkeypatch)
            try:
                with slime_program(CHECKOUT, "train_async", manager, monkeypatch) as (train, trained):
                    await asyncio.to_thread(train, args)
            finally:
                await asyncio.to_thread(rollout.stop)
            assert running.disturbed == []
    assert len(trained.given) == 2
    for ranks in trained.given:
        assert [sorted(rank["raw_reward"]) for rank in ranks] == [[0.0] * 4 + [1.0] * 4] * len(ranks)
        rewards = [reward for rank in ranks for reward in rank["rewards"]]
        assert min(rewards) < 0 < max(rewards), "every group has an advantage"
