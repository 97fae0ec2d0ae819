"""Places in an engine's cache against none, on a real vLLM on this machine's CPU: `sched_agent`'s agents.

The model has random weights and a vocabulary of words, so that texts become the ids that were sampled again. Of 32
sessions in groups of four, 24 live at a time, with tools of a twentieth of a second to 15. vLLM's cache holds the mean
contexts of a third of the 24, or of one and a half times as many. Everything between agents and vLLM is real: a server,
a node, its proxy. Variants take turns; the cache is empty at the start of each.

- `sched.sessions_ratio`: sessions in a time with places, over those without (`fits_ratio`: with the large cache)
- `sched.hit_rate`, `sched.hit_rate_without`: of prompts' tokens, by vLLM's own counters
- `sched.ratio_thunderagent`: the same agents in this process, through ThunderAgent's router to the same vLLM.
  GANGLINE_THUNDERAGENT names a checkout; without it this is not measured.
- `sched.longest_wait_s`: for a place, in all rounds

Needs the environment of `make test-vllm`. `--rounds N` and `--variants` change what a run by hand does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
import torch
from sched_agent import NUM_WORDS, all_traces, play, task_of
from service_bench import served
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gangline.agents.harnesses.native.model import Message
from gangline.models.engines.cache import EngineCache, engine_page
from gangline.models.engines.metrics_page import samples
from gangline.wire.client.server import ServerClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.engines.vllm_engine import running_server, running_vllm

NODE = Path(__file__).with_name("sched_agent.py")
NUM_SLOTS, BLOCK = 24, 32
NUM_ROUNDS, NUM_LOOSE_ROUNDS = 5, 3
_CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
_OPTIONS = (
    *("--max-model-len", "8192", "--max-num-seqs", "64", "--block-size", str(BLOCK)),
    "--enable-prompt-tokens-details",
)

Figures = dict[str, dict[str, Any]]


class Measured(NamedTuple):
    seconds: float
    hit_rate: float
    longest_wait_s: float = 0.0


def write_model(folder: Path) -> None:
    vocabulary = ["<|im_start|>", "<|im_end|>", "system", "user", "assistant", "?"]
    vocabulary += [f"w{number}" for number in range(NUM_WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(vocabulary), eos_token_id=1, bos_token_id=None, **_CONFIG))
    model.save_pretrained(folder)


@asynccontextmanager
async def _counted(engine_url: str, found: dict[str, float]) -> AsyncGenerator[None]:
    """Start with an empty cache; leaves what share of the prompts' tokens was found in it, and the seconds."""
    async with aiohttp.ClientSession() as http, http.post(f"{engine_url}/reset_prefix_cache") as response:
        response.raise_for_status()
    before, began_at = await _cache(engine_url), time.perf_counter()
    yield
    found["seconds"] = time.perf_counter() - began_at
    after = await _cache(engine_url)
    found["hit_rate"] = (after.num_hit - before.num_hit) / (after.num_queried - before.num_queried)


async def _cache(engine_url: str) -> EngineCache:
    found, _ = await engine_page(engine_url, None)
    assert found is not None
    return found


async def by_gangline(folder: Path, engine_url: str, places: str) -> Measured:
    groups = list(dict.fromkeys(trace.group for trace in all_traces().values()))
    found: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served("server", folder / "server"))
        settings = (folder / "node", server.url, engine_url, NUM_SLOTS, places)
        node = await stack.enter_async_context(served("n1", *settings, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        async with _counted(engine_url, found):
            await client.submit_many([task_of(group) for group in groups])
            for group in groups:
                view = await client.wait(group)
                assert set(view.outcomes) == {"completed"}, view.outcomes
        async with aiohttp.ClientSession() as http, http.get(f"{node.url}/metrics") as response:
            waits = samples(await response.read(), ("gangline_places_longest_wait_seconds",))
            longest_wait_s = max((sample.value for sample in waits), default=0.0)
    return Measured(found["seconds"], found["hit_rate"], longest_wait_s)


async def by_thunderagent(folder: Path, engine_url: str, checkout: Path) -> Measured:
    slots, found = asyncio.Semaphore(NUM_SLOTS), dict[str, float]()
    router = ("ThunderAgent", "--backend-type", "vllm", "--backends", engine_url)  # with its own defaults
    with running_server(router, folder / "thunderagent.log", checkout) as url:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:

            async def live(name: str) -> None:
                async def ask(messages: Sequence[Message], num_tokens: int) -> Message:
                    body = {"model": "tiny", "messages": messages, "max_tokens": num_tokens, "program_id": name}
                    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                        response.raise_for_status()
                        return {
                            "role": "assistant",
                            "content": (await response.json())["choices"][0]["message"]["content"],
                        }

                async with slots:
                    await play(all_traces()[name], ask)
                    async with http.post(f"{url}/programs/release", json={"program_id": name}) as response:
                        response.raise_for_status()

            async with _counted(engine_url, found):
                await asyncio.gather(*map(live, all_traces()))
    return Measured(found["seconds"], found["hit_rate"])


async def rounds(model: Path, num_tokens: int, variants: Sequence[str], num_rounds: int) -> dict[str, list[Measured]]:
    measured: dict[str, list[Measured]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        folder = Path(name)
        options = (*_OPTIONS, "--num-gpu-blocks-override", str(num_tokens // BLOCK))
        with running_vllm(folder / "vllm.log", parsers=False, model=model, options=options) as url:
            for number in range(num_rounds):
                for variant in variants if number % 2 == 0 else reversed(variants):
                    here = folder / f"{variant}-{number}"
                    here.mkdir()
                    if variant == "thunderagent":
                        one = await by_thunderagent(here, url, Path(os.environ["GANGLINE_THUNDERAGENT"]))
                    else:
                        one = await by_gangline(here, url, variant)
                    measured[variant].append(one)
                    print(f"  {num_tokens} tokens, {variant}: {json.dumps(one._asdict())}", file=sys.stderr, flush=True)
    return measured


def tokens_of(fraction: float) -> int:
    """Of the mean contexts of the sessions that live at a time."""
    return int(NUM_SLOTS * fmean(trace.mean_context for trace in all_traces().values()) * fraction)


def run() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-model-") as name:
        write_model(Path(name))
        variants = ["none", "places", *(["thunderagent"] if os.environ.get("GANGLINE_THUNDERAGENT") else [])]
        tight = asyncio.run(rounds(Path(name), tokens_of(1 / 3), variants, NUM_ROUNDS))
        loose = asyncio.run(rounds(Path(name), tokens_of(1.5), variants[:2], NUM_LOOSE_ROUNDS))
    return figures(tight, loose)


def figures(tight: dict[str, list[Measured]], loose: dict[str, list[Measured]]) -> Figures:
    places, without = tight["places"], tight["none"]
    note = f"{NUM_SLOTS} sessions at a time, a cache for the contexts of a third; {len(places)} interleaved rounds"
    fits = f"a cache for one and a half times the contexts; {len(loose['places'])} interleaved rounds"
    hit_rates = {"hit_rate": places, "hit_rate_without": without}
    found: Figures = {
        "sched.sessions_ratio": _ratio(without, places, note),
        "sched.fits_ratio": _ratio(loose["none"], loose["places"], fits),
        "sched.longest_wait_s": _figure(max(one.longest_wait_s for one in places), "s", note),
        **{
            f"sched.{name}": _figure(median(one.hit_rate for one in them), "", note) for name, them in hit_rates.items()
        },
    }
    if "thunderagent" in tight:
        found["sched.ratio_thunderagent"] = _ratio(tight["thunderagent"], places, note)
    return found


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


def _ratio(others: Sequence[Measured], ours: Sequence[Measured], note: str) -> dict[str, Any]:
    """Of sessions in a time, ours over the others', round by round."""
    found = sorted(other.seconds / own.seconds for other, own in zip(others, ours, strict=True))
    seconds = [median(one.seconds for one in those) for those in (ours, others)]
    spread = f"{found[0]:.2f} to {found[-1]:.2f}, medians {seconds[0]:.0f} s and {seconds[1]:.0f} s"
    return _figure(round(median(found), 2), "x", f"{note}; {spread}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variants", nargs="*", default=["none", "places"])
    parser.add_argument("--fraction", type=float, default=1 / 3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gangline-bench-model-") as name:
        write_model(Path(name))
        asyncio.run(rounds(Path(name), tokens_of(arguments.fraction), arguments.variants, arguments.rounds))
