"""Memory of a training step's forward and backward pass, alongside the dense way, on a small model and a CPU.

The dense way is how the trainer computed before: an attention mask of places by places, logits of all trained tokens at
once, and float32 copies of them. Memory is the most bytes that tensors of the two passes take at a time, gradients
included and weights not, counted at each operation: it does not depend on the machine.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from gangline.train.learning.forward import token_logprobs
from gangline.train.learning.packing import Batch, LayoutKind, pack
from gangline.train.learning.samples import Sample

PLACES = 4096
VOCABULARY = 16_384


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. Under a minute."""
    row, group = _samples(1, 256, PLACES - 256), _samples(8, 1024, 384)
    dense = _peak_bytes(pack(row, "packed"), dense_logprobs)
    kept = _peak_bytes(pack(row, "packed"), token_logprobs)
    frugal = _peak_bytes(pack(row, "packed"), token_logprobs, checkpointing=True)
    trees: dict[LayoutKind, int] = {kind: _peak_bytes(pack(group, kind), token_logprobs) for kind in ("packed", "tree")}
    dense_tree = _peak_bytes(pack(group, "tree"), dense_logprobs)
    shape = f"a Llama of 4 layers, 256 wide, {VOCABULARY:,} tokens of vocabulary, in float32"
    return {
        "learn.memory.peak_ratio": {
            "value": round(dense / frugal, 1),
            "unit": "ratio",
            "note": f"peak of the dense way ({dense / 2**20:.0f} MiB) over ours with checkpointing "
            f"({frugal / 2**20:.0f} MiB); one row of {PLACES:,} places, {shape}",
        },
        "learn.memory.peak_ratio_kept": {
            "value": round(dense / kept, 1),
            "unit": "ratio",
            "note": f"the same without checkpointing ({kept / 2**20:.0f} MiB), as the dense way had it",
        },
        "learn.memory.peak_ratio_tree": {
            "value": round(dense_tree / trees["tree"], 1),
            "unit": "ratio",
            "note": f"the same for a tree: 8 rows of 1,408 places that share 1,024 ({dense_tree / 2**20:.0f} MiB, "
            f"{trees['tree'] / 2**20:.0f} MiB)",
        },
        "learn.memory.tree_gain": {
            "value": round(trees["packed"] / trees["tree"], 1),
            "unit": "ratio",
            "note": f"peak of these rows packed ({trees['packed'] / 2**20:.0f} MiB) over the tree",
        },
    }


def dense_logprobs(model: Any, batch: Batch) -> Tensor:
    """[N] as the trainer computed them before."""
    num = batch.ids.size
    visible = torch.zeros(num, num, dtype=torch.bool)
    for start, end, prefix in batch.segments:
        visible[start:end, torch.from_numpy(np.asarray(prefix))] = True
        visible[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
    places, at = np.unique(batch.sources, return_inverse=True)
    logits = model(
        input_ids=torch.from_numpy(batch.ids),
        attention_mask=mask,
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
        logits_to_keep=torch.from_numpy(places),
    ).logits
    picked = logits.reshape(-1, logits.shape[-1])[torch.from_numpy(at)]
    picked = picked / torch.from_numpy(batch.temperatures)[:, None]
    return picked.gather(-1, torch.from_numpy(batch.targets)[:, None])[:, 0] - picked.logsumexp(-1)


class _Peak(TorchDispatchMode):
    """Most bytes of storages that are alive at a time, without the model's weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self.bytes = 0
        self._now = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        if key in self._live or key in self._weights:
            return

        def freed(_: object) -> None:
            self._now -= num_bytes
            del self._live[key]

        self._live[key] = weakref.ref(storage, freed)
        self._now += num_bytes
        self.bytes = max(self.bytes, self._now)


def _peak_bytes(batch: Batch, logprobs: Callable[[Any, Batch], Tensor], *, checkpointing: bool = False) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=PLACES,
        tie_word_embeddings=True,
    )
    model = cast("Any", AutoModelForCausalLM).from_config(config).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    peak = _Peak(model)
    with peak:
        logprobs(model, batch).sum().backward()
    return peak.bytes


def _samples(num: int, prompt: int, response: int) -> list[Sample]:
    random = np.random.default_rng(0)
    common = random.integers(1, VOCABULARY, prompt).astype(np.int32)
    return [
        Sample(
            trace_id=f"s{number}/0",
            session_id=f"s{number}",
            task_id="task",
            score=1.0,
            prompt_ids=common,
            response_ids=random.integers(1, VOCABULARY, response).astype(np.int32),
            weights=np.ones(response, np.float32),
            advantages=np.ones(response),
            behaviour_logprobs=np.zeros(response, np.float32),
            versions=np.zeros(response, np.int32),
            temperatures=np.ones(response, np.float32),
        )
        for number in range(num)
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print({name: figure["value"] for name, figure in run().items()})
