"""slime's own `train.py` and `train_async.py` train on rollouts of a whole service of ours, and nobody disturbs them.

    git clone https://github.com/THUDM/slime && GANGLINE_SLIME=slime make test-trainers

`tests/support/slime/checkout.py` says what stands in for GPUs. GANGLINE_SGLANG_ROUTER may name a Python with
sglang-router: then the engines are behind that, else behind our stand-in of it. Last run with slime at 624b824 and
sglang-router 0.3.2 on 2026-11-23.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.train.trainers.slime import SlimeRollout
from support.engines.trained_sglang import TrainedSglang
from support.node.node import TOKEN
from support.slime.checkout import ABSENT, parsed_arguments, slime_manager, slime_program
from support.slime.service import SUPPLY, EngineService, Prompts, slime_arguments, task_of
from support.training.absent_modules import importable

CHECKOUT = Path(os.environ.get("GANGLINE_SLIME", ""))
ROUTER = os.environ.get("GANGLINE_SGLANG_ROUTER")
pytestmark = [
    pytest.mark.skipif("GANGLINE_SLIME" not in os.environ, reason="GANGLINE_SLIME names no checkout of slime"),
    pytest.mark.filterwarnings("ignore"),
]
SIZES = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4")


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRAINER_KEY", TOKEN)
    with importable(CHECKOUT, *ABSENT):
        yield


@asynccontextmanager
async def real_router() -> AsyncGenerator[dict[str, Any] | None]:
    if ROUTER is None:
        yield None
        return
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--disable-health-check"]
    process = subprocess.Popen([ROUTER, "-m", "sglang_router.launch_router", *options, "--log-level", "warn"])
    try:
        await until_listing(f"http://127.0.0.1:{port}", 0)
        yield {"sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
    finally:
        process.terminate()
        process.wait()


async def until_listing(router: str, num_engines: int) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(router + "/workers") as answer:
                    if len((await answer.json())["workers"]) == num_engines:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


def arguments(*options: str, **found: Any) -> Any:
    """By slime's own parser, and what its checks and its start make of them."""
    args = parsed_arguments(CHECKOUT, *SIZES, *options)
    vars(args).update(
        offload_rollout=args.colocate,
        offload_train=args.colocate,
        over_sampling_batch_size=args.over_sampling_batch_size or args.rollout_batch_size,
        use_critic=False,
        start_rollout_id=0,
        micro_batch_size=1,
        sglang_speculative_algorithm=None,
    )
    vars(args).update(found)
    return args


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("train", ()),
        ("train", ("--colocate",)),
        ("train_async", ("--use-tis",)),
        ("train_async", ("--use-tis", "--partial-rollout", "--over-sampling-batch-size", "3")),
        ("train_async", ("--use-tis", "--update-weights-interval", "2")),
    ],
)
async def test_slime_trains_on_our_rollouts(
    program: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.utils.types import Sample  # type: ignore[import-not-found]

    engines = TrainedSglang(reply_s=0.02), TrainedSglang(reply_s=0.02)
    async with real_router() as router, EngineService.running(tmp_path, *engines, router=router) as running:
        args = arguments(*options, **running.address)
        rollout = SlimeRollout(running.client.url, task_of, tmp_path / "inbox", token_env="TRAINER_KEY", supply=SUPPLY)
        manager = slime_manager(args, rollout, Prompts(Sample), list(running.engines), monkeypatch)
        if router is not None:
            for engine in manager.rollout_engines:
                await asyncio.to_thread(engine.made._register_to_router, {})
            await until_listing(f"http://127.0.0.1:{router['sglang_router_port']}", len(engines))
        try:
            with slime_program(CHECKOUT, program, manager, monkeypatch) as (train, trained):
                await asyncio.to_thread(train, args)
        finally:
            await asyncio.to_thread(rollout.stop)
        assert running.disturbed == []
        assert len(trained.given) == args.num_rollout
        for ranks in trained.given:  # all sessions of each rollout, each once
            numbers = [number for rank in ranks for number in rank["rollout_ids"]]
            assert len(numbers) == len(set(numbers)) == 4


def test_the_stand_in_of_its_arguments_has_its_defaults() -> None:
    args = parsed_arguments(CHECKOUT, *SIZES)
    ours = vars(slime_arguments())
    sizes = {"rollout_batch_size", "over_sampling_batch_size", "n_samples_per_prompt", "global_batch_size"}
    assert {name: getattr(args, name) for name in ours.keys() - sizes} == {
        name: value for name, value in ours.items() if name not in sizes
    }
