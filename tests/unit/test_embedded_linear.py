from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.serving.embedded.weights import PackedLinear, pack

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="layers are packed on x86 CPUs")


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.inner = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(ids)))


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    rows=st.integers(1, 40),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_layer_computes_what_the_layer_does(
    inputs: int, outputs: int, rows: int, has_bias: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(inputs, outputs, bias=has_bias)
    values = torch.randn(1, rows, inputs, generator=random)
    weight = torch.randn(outputs, inputs, generator=random)
    packed = PackedLinear(linear)

    with torch.inference_mode():
        torch.testing.assert_close(packed(values), linear(values), rtol=1e-5, atol=1e-5)
        assert torch.equal(packed.weight, linear.weight)

        packed.replace(weight)

        expected = torch.nn.functional.linear(values, weight, linear.bias)
        torch.testing.assert_close(packed(values), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(packed.weight, weight)


def test_all_linear_layers_of_a_model_are_packed_and_found_by_name() -> None:
    model = _Tied()
    ids = torch.tensor([[3, 1, 39]])
    with torch.inference_mode():
        before = model(ids)

        made = pack(model)

        torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-5)
    assert made == {"inner.weight": [model.inner], "embedding.weight": [model.head]}
    assert dict(model.named_parameters()).keys() == {"embedding.weight", "inner.bias"}


def test_other_layers_stay() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Own(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16))

    assert pack(model) == {}
    assert [type(layer) for layer in model] == [Own, torch.nn.Linear]
