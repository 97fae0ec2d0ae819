"""Laws of sampling, for any logits, parameters and random numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.serving.embedded.sampling import RowParameters, draw, processed_logprobs

logits = st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=30)
parameters = st.builds(
    RowParameters,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 5.0]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 40),
    banned_ids=st.just(frozenset()),
    num_top_logprobs=st.just(0),
    penalties=st.just({}),
)
uniforms = st.one_of(st.floats(0, 1, exclude_max=True), st.just(0.0), st.just(1 - 2**-53))


@given(logits, parameters, uniforms, st.floats(-4, 4))
def test_a_drawn_id_was_possible_and_its_logprob_is_the_distributions(
    values: list[float], row: RowParameters, u: float, penalty: float
):
    row = row._replace(penalties={0: penalty} if penalty else {})
    row_logits = torch.tensor([values])
    drawn = draw(row_logits, [row], [u])[0]
    logprobs = processed_logprobs(row_logits, [row])[0]
    assert drawn.logprob > float("-inf")
    assert drawn.logprob == logprobs[drawn.token_id].item()
    assert logprobs.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@given(logits, parameters)
def test_truncation_keeps_the_most_probable(values: list[float], row: RowParameters):
    logprobs = processed_logprobs(torch.tensor([values]), [row])[0]
    kept = logprobs.isfinite()
    assert torch.tensor(values)[kept].max() == max(values)
    excluded = torch.tensor(values)[~kept]
    if len(excluded):
        assert excluded.max() <= torch.tensor(values)[kept].min()
    if row.top_k and row.temperature:
        assert kept.sum() <= row.top_k
