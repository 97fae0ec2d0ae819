"""No tensor of a forward or backward pass is places by places, or places by vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PreTrainedModel

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.compute import attention
from gangline.train.learning.compute.head import output_head, require_known_head
from gangline.train.learning.forward import token_scores
from gangline.train.learning.packing import LayoutKind, pack
from gangline.train.learning.samples import Sample
from support.engines.models import CONFIGS, VOCAB_SIZE
from support.training.dense import dense_scores
from support.training.memory import TensorMemory
from support.training.samples import sample

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def model(config: Any) -> PreTrainedModel:
    """By `sdpa`, or `eager` where the family has no other."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cast("Any", AutoModelForCausalLM).from_config(copy.deepcopy(config))


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    return model(CONFIGS["qwen3"]).double().eval()


@pytest.fixture(scope="module", params=[2, attention.BLOCK], ids="block of {}".format)
def frugal(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", request.param)
        yield model(CONFIGS["qwen3"]).double().eval()


@st.composite
def batches_of_samples(draw: st.DrawFn) -> list[Sample]:
    """Samples that share prefixes, with holes in their weights, each of a temperature."""
    ids = st.lists(st.integers(1, 4), min_size=1, max_size=7)
    found = list[Sample]()
    for number in range(draw(st.integers(1, 5))):
        response = draw(ids)
        weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(response), max_size=len(response)))
        temperature = draw(st.sampled_from([0.3, 1.0, 1.7]))
        made = sample(draw(ids), response, session_id=f"s{number}", weights=weights, temperature=temperature)
        found.append(made)
    return found


@given(batches_of_samples(), st.sampled_from(["packed", "tree"]), st.sampled_from([1, 3, 512]))
def test_chunks_and_segments_change_no_number(
    frugal: PreTrainedModel, dense: PreTrainedModel, samples: list[Sample], kind: LayoutKind, chunk: int
) -> None:
    batch = pack(samples, kind)
    found = token_scores(frugal, batch, chunk=chunk, entropy_has_gradient=True)
    expected = dense_scores(dense, batch)
    for one, other in zip((found.logprobs, found.entropies), expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    weights = torch.arange(1.0, len(batch.targets) + 1)
    gradients = [
        torch.autograd.grad(((one[0] + 0.3 * one[1]) * weights).sum(), list(trained.parameters()), allow_unused=True)
        for one, trained in ((found, frugal), (expected, dense))
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, rtol=1e-5, atol=1e-5)


LONG = {"hidden_size": 64, "vocab_size": 997, "max_position_embeddings": 4096}


def long_rows(num: int, prompt: int, response: int) -> list[Sample]:
    """Sessions with one prompt."""
    random = np.random.default_rng(0)
    common = random.integers(1, 997, prompt).tolist()
    return [
        sample(common, random.integers(1, 997, response).tolist(), session_id=f"s{number}") for number in range(num)
    ]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", ["padded", "packed", "tree"])
def test_no_tensor_is_as_large_as_places_by_places_or_by_vocabulary(kind: LayoutKind, checkpointing: bool) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.update(LONG)
    trained = model(config).train()
    if checkpointing:
        trained.activation_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
    # One long row, or branches from a long prompt.
    batch = pack(long_rows(1, 100, 1500) if kind != "tree" else long_rows(3, 700, 300), kind)
    memory = TensorMemory(trained)
    with memory.keeping():
        scores = token_scores(trained, batch, chunk=64)
    with memory:
        scores.logprobs.sum().backward()
    places, tokens = batch.num_places, len(batch.targets)
    assert memory.largest_numel < min(places * places, tokens * 997) / 2.5, memory.largest
    per_place = memory.saved_bytes / 4 / places
    assert per_place < (450 if checkpointing else 4000), "numbers kept for the backward pass"


def test_the_dense_way_does_have_such_tensors() -> None:
    """The test above would notice them."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.update(LONG)
    batch, memory = pack(long_rows(3, 100, 400), "packed"), TensorMemory()
    with memory.keeping():
        dense_scores(model(config), batch)
    assert memory.largest_numel >= min(batch.num_places**2, len(batch.targets) * 997)


def by_segments(*arrays: Any, **options: Any) -> torch.Tensor:
    """`varlen_attn`, a segment at a time: its last query sees its last key."""
    query, key, value, queries, keys, _most, _longest = arrays
    assert (query.dtype, key.dtype, value.dtype) == (torch.bfloat16,) * 3
    assert options["window_size"] == (-1, 0)
    found = list[torch.Tensor]()
    for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:], strict=False):
        num_queries, num_keys = int(q1 - q0), int(k1 - k0)
        sees = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        part = (one[None].transpose(1, 2) for one in (query[q0:q1], key[k0:k1], value[k0:k1]))
        scores = torch.nn.functional.scaled_dot_product_attention(
            *part, attn_mask=sees, scale=options["scale"], enable_gqa=options["enable_gqa"]
        )
        found.append(scores[0].transpose(0, 1))
    return torch.cat(found)


FORKED = [
    sample([5, 6, 7], [8, 9, 10, 11], session_id="s0"),
    sample([5, 6, 7], [8, 9, 12], session_id="s1"),
    sample([20, 21], [22, 23, 24], session_id="s2"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["packed", "tree"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_card_computes_the_same_by_its_own_kernels(
    family: str, kind: LayoutKind, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision: FlashAttention, although RoPE makes queries and keys float32. Float32: kernels without grouped
    heads, since with them and a mask PyTorch would keep all scores.
    """

    def computed() -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = model(CONFIGS[family])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logprobs = token_scores(found, pack(FORKED, kind)).logprobs
        logprobs.sum().backward()
        return logprobs.detach(), [one.grad for one in found.parameters() if one.grad is not None]

    calls = list[str]()

    def flash(*arrays: Any, **options: Any) -> torch.Tensor:
        calls.append("flash")
        return by_segments(*arrays, **options)

    attend = attention.scaled_dot_product_attention

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("attn_mask") is not None:
            assert key.shape[1] == value.shape[1] == query.shape[1]
            calls.append("masked")
        return attend(query, key, value, **options)

    expected = computed()
    monkeypatch.setattr(attention, "_CARD", "cpu")
    monkeypatch.setattr(attention, "_has_flash", lambda _query: True)
    monkeypatch.setattr(attention, "varlen_attn", flash)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", fused)
    found = computed()
    assert set(calls) == ({"flash"} if dtype == "bfloat16" else {"masked"} if kind == "tree" else set())
    tolerance = 0.05 if dtype == "bfloat16" else 1e-5
    assert torch.allclose(found[0], expected[0], atol=tolerance)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)


HEADS: dict[str, Any] = {
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "granite": GraniteConfig(**SHAPE, logits_scaling=8.0),
    "gemma2": Gemma2Config(**SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=None),
}


@pytest.mark.parametrize("family", HEADS)
def test_settings_of_the_output_layer_count(family: str) -> None:
    """Padded: Gemma 2 has sliding windows."""
    found = model(HEADS[family]).eval()
    require_known_head(found)
    batch = pack([sample([5, 6], [7, 8, 9], temperature=0.5)], "padded")
    logits = found(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 1:4] / 0.5
    expected = logits.log_softmax(-1).gather(-1, torch.tensor([[7], [8], [9]]))[:, 0]
    assert torch.allclose(token_scores(found, batch).logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 0])
def test_an_output_layer_that_is_not_understood_is_refused(
    monkeypatch: pytest.MonkeyPatch, padding: int | None
) -> None:
    """The states of a padding token are 0 in a model that never learned it, and so are its logits times any factor."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.pad_token_id = padding
    found = model(config).eval()
    call = type(found).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = call(self, *args, **kwargs)
        made.logits = made.logits * 2
        return made

    monkeypatch.setattr(type(found), "forward", doubled)
    with pytest.raises(InvalidRequest, match="LlamaForCausalLM changes its logits"):
        require_known_head(found)
    assert output_head(found)(torch.zeros(1, 32)).shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SHAPE, sliding_window=4, attn_logit_softcapping=None), "sliding window of 4"),
        (Gemma2Config(**SHAPE), "softcap"),
    ],
    ids=["window", "softcap"],
)
def test_attention_that_rows_do_not_fit_is_refused_by_name(config: Any, reason: str) -> None:
    batch = pack([sample([5, 6], [7, 8, 9]), sample([5, 6], [9], session_id="s1")], "tree")
    with pytest.raises(InvalidRequest, match=f"(?s)layout: padded.*{reason}"):
        token_scores(model(config), batch)


def test_a_model_keeps_its_own_attention_in_other_calls() -> None:
    """After a packed batch: right and left padding, with the mask of the call."""
    found, plain = model(CONFIGS["llama"]).eval(), model(CONFIGS["llama"]).eval()
    token_scores(found, pack([sample([5, 6], [7, 8, 9])], "packed"))
    ids, mask = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    one, other = (each(input_ids=ids, attention_mask=mask).logits[:, 2:] for each in (found, plain))
    assert torch.allclose(one, other, atol=1e-6)
