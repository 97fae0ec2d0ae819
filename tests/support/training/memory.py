"""Memory of a computation, counted by its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"""Qwen2.5-7B."""


class TensorMemory(TorchDispatchMode):
    """Records tensors while it is entered: the largest one made, the most that live, what the backward pass needs."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        """model: its weights do not count."""
        super().__init__()
        self._weights = (
            set[int]() if model is None else {one.untyped_storage().data_ptr() for one in model.parameters()}
        )
        self.largest = torch.Size()
        self.peak_bytes = 0
        """Most bytes that tensors made meanwhile took at a time."""
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.live_bytes = 0
        """Of such tensors now."""
        self.saved: dict[int, int] = {}
        """Address of a storage -> its bytes."""

    @property
    def largest_numel(self) -> int:
        return self.largest.numel()

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            # A view of few elements, such as an expanded one, is not its own memory.
            if isinstance(one, Tensor) and one.untyped_storage().nbytes() >= one.numel() * one.element_size():
                self.largest = max(self.largest, one.shape, key=torch.Size.numel)
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._live or key in self._weights:
            return

        def freed(_: object) -> None:
            self.live_bytes -= self._live.pop(key)[1]

        self._live[key] = weakref.ref(storage, freed), storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def keeping(self) -> Generator[None]:
        """The forward pass, whose saved tensors count."""

        def keep(one: Tensor) -> Tensor:
            self.saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), self:
            yield
