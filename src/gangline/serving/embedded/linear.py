"""Linear layers in oneDNN's kernels, with their weights in the order in which these read them.

PyTorch multiplies float32 matrices with Intel's MKL, which uses half of the vector width of AMD's processors. oneDNN,
in the same wheel, uses all of it. PyTorch's own compiler calls it on a CPU. Its operators have no public names, so
PyTorch is pinned to a minor version.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

__all__ = ["PackedLinear", "pack"]

_OPERATORS: Any = torch.ops.mkldnn


class PackedLinear(torch.nn.Module):
    """What an `nn.Linear` computes. It keeps the packed weights alone, so it takes no more memory."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = _packed(linear.weight)

    @property
    def weight(self) -> torch.Tensor:
        """A copy: [outputs, inputs]. Some models read it."""
        return self._packed.to_dense()

    def replace(self, weight: torch.Tensor) -> None:
        """weight: [outputs, inputs]."""
        self._packed = _packed(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _OPERATORS._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")


def pack(module: torch.nn.Module) -> dict[str, list[PackedLinear]]:
    """Replace the linear layers of a float32 model on an x86 CPU; elsewhere none.

    Returns:
        name of a parameter -> the layers that are made of it, which must be given its new values. A head that is tied
        to the embedding is under the embedding's name.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    made: dict[str, list[PackedLinear]] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            # Not its subclasses: they may compute something else.
            if type(child) is torch.nn.Linear and _can_pack(child.weight):
                packed = PackedLinear(child)
                setattr(parent, name, packed)
                made.setdefault(name_of[id(child.weight)], []).append(packed)
    return made


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
    )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        # The number of rows, which would be next, is not known.
        return _OPERATORS._reorder_linear_weight(weight.detach().float().contiguous(), None)
