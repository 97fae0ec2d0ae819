"""The weights of a served model, by their names in its checkpoint.

Linear layers use oneDNN's kernels, with weights in the layout that these read.

PyTorch multiplies float32 matrices with Intel's MKL, which uses half of the vector width of AMD's processors. oneDNN,
in the same wheel, uses all of it. PyTorch's own compiler calls it on a CPU. Its operators have no public names, so
PyTorch is pinned to a minor version.
"""

from __future__ import annotations

import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from gangline.domain.errors import InvalidRequest, NotFound

_OPERATORS: Any = torch.ops.mkldnn


class PackedLinear(torch.nn.Module):
    """Computes the same as an `nn.Linear`. It keeps only the packed weights, so it takes no more memory."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = _packed(linear.weight)

    @property
    def weight(self) -> torch.Tensor:
        """A copy, [outputs, inputs], because some models read it."""
        return self._packed.to_dense()

    def replace(self, weight: torch.Tensor) -> None:
        """weight: [outputs, inputs]."""
        self._packed = _packed(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _OPERATORS._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")


def pack(module: torch.nn.Module) -> dict[str, list[PackedLinear]]:
    """Replace the linear layers of a float32 model on an x86 CPU; does nothing elsewhere.

    Returns:
        name of a parameter -> the layers made from it, which must receive its new values. A head that is tied
        to the embedding is under the embedding's name.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    made: dict[str, list[PackedLinear]] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            # Not subclasses, which may compute something else.
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
        # The next argument, the number of rows, is unknown.
        return _OPERATORS._reorder_linear_weight(weight.detach().float().contiguous(), None)


class Weights:
    """Created from a loaded model, whose linear layers it packs."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._tied = names - set(self._shapes)
        """Second names. A tied head has no parameter of its own, but some trainers save it anyway."""
        self._packed = pack(module)
        self._parameters = dict(module.named_parameters())
        """Parameters that are not packed."""

    def load(self, folder: Path) -> None:
        """Replace the weights in place from a safetensors checkpoint folder.

        All names and shapes are checked before the first weight changes.

        Raises:
            NotFound: the folder has no safetensors.
            InvalidRequest: a weight is missing, unknown, or of another shape.
        """
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise NotFound(f"{folder} has no *.safetensors weights")
        try:
            self._check(files)
            for file in files:
                with _opened(file) as checkpoint, torch.no_grad():
                    for name in sorted(set(checkpoint.keys()) - self._tied):
                        self._replace(name, checkpoint.get_tensor(name))
        except SafetensorError as error:
            raise InvalidRequest(f"the weights in {folder} cannot be read: {error}") from error

    def _replace(self, name: str, weight: torch.Tensor) -> None:
        if name in self._parameters:
            self._parameters[name].copy_(weight)
        for layer in self._packed.get(name, ()):
            layer.replace(weight)

    def _check(self, files: Sequence[Path]) -> None:
        found: dict[str, tuple[int, ...]] = {}
        for file in files:
            with _opened(file) as checkpoint:
                for name in sorted(checkpoint.keys()):
                    found[name] = tuple(checkpoint.get_slice(name).get_shape())
        wrong = [f"{name} is missing" for name in self._shapes if name not in found]
        wrong += [f"{name} is unknown" for name in found if name not in self._shapes and name not in self._tied]
        wrong += [
            f"{name} is {list(found[name])}, not {list(shape)}"
            for name, shape in self._shapes.items()
            if name in found and found[name] != shape
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise InvalidRequest(f"the checkpoint does not fit the model that is served: {'; '.join(wrong[:3])}{more}")


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    """safetensors' reader, which is untyped."""
    opener = cast("Any", safe_open)
    with opener(str(file), framework="pt") as checkpoint:
        yield checkpoint
