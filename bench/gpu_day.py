"""What the learner does on a card: attention, memory, speed and pushes, measured within 40 minutes, without a network.

    python bench/gpu_day.py --out FOLDER [STEP ...]     all steps, on a GPU (one H200 has room for them)
    python bench/gpu_day.py --rehearse --out FOLDER     the same on a CPU with tiny models, in half a minute

Models have random weights, made from a configuration. Each step is a process of ten minutes at most; one that fails is
told, and the others go on. FOLDER gets report.json and report.md. Ends with 1 where a step failed or a figure is off.

- `attention`: the path that the learner takes in bfloat16 against float64, forward and backward, next to the error of
  PyTorch's own attention.
- `memory`: the peak of one update against `gangline train memory`.
- `speed`: trained tokens a second, by dtype and layout.
- `push`: seconds, bytes and memory of weights that are saved for engines.

Not in it yet: vLLM beside the learner, the families of tasks, verl with its own engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.compute import attention
from gangline.train.learning.compute.memory import GIB, read_shape, step_memory
from gangline.train.learning.learner import Learner
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.learning.packing import pack
from gangline.train.learning.samples import Sample
from support.training.memory import QWEN_7B
from support.training.samples import sample

STEP_S = 600
OFF = 0.05
"""Largest share by which a measured peak may differ from the computed one."""

Found = dict[str, Any]


class Size(NamedTuple):
    """Models and lengths of one day."""

    device: str
    config: dict[str, Any]
    """Of the model in `memory`."""
    small: dict[str, Any]
    """Of the model in `speed` and `push`."""
    lengths: tuple[int, ...]
    """Tokens of a row, in `memory`."""
    prompt: int
    response: int
    """Of the samples in `speed`, which share their prompt."""
    heads: tuple[int, int, int]
    """Queries, keys, their width."""


QWEN_1_5B = {
    **QWEN_7B,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
CARD = Size("cuda", QWEN_7B, QWEN_1_5B, (4096, 16384, 32768), 4096, 1024, (28, 4, 128))
_TINY = {
    **QWEN_7B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
REHEARSAL = Size("cpu", _TINY, _TINY, (128,), 48, 16, (4, 2, 16))


def _samples(prompt: int, response: int, num: int, vocabulary: int) -> list[Sample]:
    """Of one group: a prompt, and as many responses that share half of their tokens."""
    rng = np.random.default_rng(0)
    start, common = (rng.integers(1, vocabulary, length).tolist() for length in (prompt, response // 2))
    found = []
    for number in range(num):
        own = rng.integers(1, vocabulary, response - len(common)).tolist()
        one = sample(start, [*common, *own], session_id=f"s{number}")
        one.advantages[:] = 1.0 if number % 2 else -1.0
        found.append(one)
    return found


# -- attention ----------------------------------------------------------------------------------------------------


def _by_float64(query: Tensor, key: Tensor, value: Tensor, rows: attention.Rows) -> Tensor:
    """[1, L, heads, D], a segment at a time, without any kernel of half precision."""
    found = list[Tensor]()
    for one, length in zip(rows.segments, rows.key_lengths, strict=True):
        seen = [*one.prefix.tolist(), *range(one.start, one.end)]
        num = one.end - one.start
        mask = torch.ones(num, length, dtype=torch.bool, device=query.device).tril(length - num)
        part = (query[:, :, one.start : one.end], key[:, :, seen], value[:, :, seen])
        found.append(scaled_dot_product_attention(*part, attn_mask=mask, enable_gqa=True))
    return torch.cat(found, dim=2).transpose(1, 2)


def _error(mine: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(mine, exact, strict=True))


def attention_step(size: Size) -> Found:
    heads, groups, width = size.heads
    found: Found = {}
    for kind in ("packed", "tree"):
        batch = pack(_samples(size.prompt // 2, size.response, 4, 500), cast("Any", kind))
        rows = attention.Rows(batch.segments, torch.device(size.device))
        generator = torch.Generator(size.device).manual_seed(0)
        shape = {"device": size.device, "generator": generator, "dtype": torch.float64}
        inputs = [torch.randn(1, num, batch.num_places, width, **shape) for num in (heads, groups, groups)]

        def computed(way: Callable[..., Any], dtype: torch.dtype, given: list[Tensor] = inputs) -> list[Tensor]:
            leaves = [one.detach().to(dtype, copy=True).requires_grad_() for one in given]
            out = way(*leaves)
            out.sum().backward()
            return [out.detach(), *(cast("Tensor", one.grad) for one in leaves)]

        def ours(query: Tensor, key: Tensor, value: Tensor, rows: attention.Rows = rows) -> Tensor:
            return attention._attention(torch.nn.Identity(), query, key, value, None, rows=rows)[0]

        def plain(query: Tensor, key: Tensor, value: Tensor, rows: attention.Rows = rows) -> Tensor:
            return _by_float64(query, key, value, rows)

        exact = computed(plain, torch.float64)
        error, usual = _error(computed(ours, torch.bfloat16), exact), _error(computed(plain, torch.bfloat16), exact)
        found[kind] = {"error": error, "error_of_sdpa": usual, "ok": error <= 2 * usual}
    return found


# -- memory, speed, pushes ----------------------------------------------------------------------------------------


def _made(folder: Path, config: dict[str, Any], device: str) -> Path:
    """A model with random weights."""
    if not (folder / "config.json").exists():
        fields = dict(config)
        made = cast("Any", AutoConfig).for_model(fields.pop("model_type"), **fields)
        with torch.device(device):
            model = cast("Any", AutoModelForCausalLM).from_config(made, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def _learner(folder: Path, size: Size, **fields: Any) -> Learner:
    given = {"device": size.device, "reference_metric": False, "dtype": "bfloat16", **fields}
    return Learner(folder, algorithm("grpo", {}), LearnerSettings.model_validate(given))


def _peak(size: Size, work: Callable[[], object]) -> tuple[float, float | None]:
    """Seconds, and the most bytes on the card."""
    if size.device == "cpu":
        began_at = time.perf_counter()
        work()
        return time.perf_counter() - began_at, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began_at = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began_at, float(torch.cuda.max_memory_allocated())


WAYS: dict[str, dict[str, Any]] = {"adafactor": {"optimiser": "adafactor"}, "lora": {"lora": {"rank": 16}}}


def memory_step(size: Size, folder: Path) -> Found:
    model = _made(folder / "large", size.config, size.device)
    found: Found = {}
    for way, fields in WAYS.items():
        learner = _learner(model, size, **fields)
        for length in size.lengths:
            rows = _samples(length - size.response, size.response, 1, size.config["vocab_size"])
            took_s, peak = _peak(size, lambda learner=learner, rows=rows: learner.step(rows))
            settings = LearnerSettings.model_validate({"dtype": "bfloat16", "reference_metric": False, **fields})
            computed = step_memory(
                read_shape(model), settings, num_places=length, checkpointing=size.device != "cpu"
            ).total
            off = None if peak is None else peak / computed - 1
            found[f"{way}, {length} tokens"] = {
                "seconds": took_s,
                "computed_gib": computed / GIB,
                "measured_gib": None if peak is None else peak / GIB,
                "ok": off is None or abs(off) <= OFF,
            }
        del learner
        torch.cuda.empty_cache()
    return found


def speed_step(size: Size, folder: Path) -> Found:
    model = _made(folder / "small", size.small, size.device)
    samples = _samples(size.prompt, size.response, 8, size.small["vocab_size"])
    num_tokens = sum(int((one.weights != 0).sum()) for one in samples)
    found: Found = {}
    for dtype in ("bfloat16", "float32"):
        for layout in ("tree", "packed", "padded"):
            learner = _learner(model, size, dtype=dtype, layout=layout, max_places=8 * (size.prompt + size.response))
            learner.step(samples)  # kernels are chosen, moments are made
            took_s, _ = _peak(size, lambda learner=learner: learner.step(samples))
            found[f"{dtype}, {layout}"] = {"tokens_per_s": num_tokens / took_s}
            del learner
            torch.cuda.empty_cache()
    return found


def push_step(size: Size, folder: Path) -> Found:
    model = _made(folder / "small", size.small, size.device)
    found: Found = {}
    for way, fields in {"every weight": {}, "lora": WAYS["lora"]}.items():
        for dtype in ("float32", "bfloat16"):
            learner = _learner(model, size, push_dtype=dtype, optimiser="adafactor", **fields)
            before = 0 if size.device == "cpu" else torch.cuda.memory_allocated()
            target = folder / "pushed"
            took_s, peak = _peak(size, lambda learner=learner, target=target: learner.save_weights(target))
            found[f"{way}, {dtype}"] = {
                "seconds": took_s,
                "gib": sum(file.stat().st_size for file in target.glob("*.safetensors")) / GIB,
                "extra_gib_on_the_card": None if peak is None else (peak - before) / GIB,
            }
            for file in target.iterdir():
                file.unlink()
            del learner
            torch.cuda.empty_cache()
    return found


STEPS: dict[str, Callable[[Size, Path], Found]] = {
    "attention": lambda size, _folder: attention_step(size),
    "memory": memory_step,
    "speed": speed_step,
    "push": push_step,
}


def _run(name: str, arguments: argparse.Namespace) -> Found:
    """A step in a process of its own."""
    command = [sys.executable, __file__, "--out", str(arguments.out), "--only", name]
    command += ["--rehearse"] if arguments.rehearse else []
    began_at = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {STEP_S} s"}
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return {"seconds": round(time.monotonic() - began_at, 1), "found": json.loads(done.stdout.splitlines()[-1])}


def _page(report: Found) -> str:
    lines = [f"# {report['device']}, torch {report['torch']}", ""]
    for name, step in report["steps"].items():
        lines += [f"## {name}", ""]
        if "failed" in step:
            lines += ["failed:", "", "```", step["failed"], "```", ""]
            continue
        for what, figures in step["found"].items():
            told = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
            )
            lines.append(f"- {what}: {told}")
        lines.append("")
    return "\n".join(lines)


def _is_well(step: Found) -> bool:
    return "failed" not in step and all(figures.get("ok", True) for figures in step["found"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], metavar="STEP")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = REHEARSAL if arguments.rehearse else CARD
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only:
        print(json.dumps(STEPS[arguments.only](size, arguments.out)))
        return
    if size.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is seen by PyTorch; --rehearse runs the same on a CPU.")
    report: Found = {
        "device": "a rehearsal on a CPU" if arguments.rehearse else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": {},
    }
    for name in arguments.steps or STEPS:
        print(f"  {name} ...", file=sys.stderr, flush=True)
        report["steps"][name] = _run(name, arguments)
        (arguments.out / "report.json").write_text(json.dumps(report, indent=2))
        (arguments.out / "report.md").write_text(_page(report))
    print((arguments.out / "report.md").read_text())
    if not all(map(_is_well, report["steps"].values())):
        sys.exit(1)


if __name__ == "__main__":
    main()
