"""What is drawn, and the log-prob that is reported for it."""

from __future__ import annotations

import math
import random
from typing import cast

import pytest
import torch

from gangline.models.engine_server.sampler import SampleRequest
from gangline.serving.embedded.batch import Sequence as BatchSequence
from gangline.serving.embedded.kv_cache import KvCache
from gangline.serving.embedded.sampling import RowParameters, draw, processed_logprobs

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0])


def one(parameters: RowParameters, uniform: float = 0.5):
    return draw(LOGITS[None], [parameters], [uniform])[0]


def test_logprob_is_that_of_the_tempered_distribution():
    drawn = one(RowParameters(temperature=0.5), 0.0)
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx((LOGITS / 0.5).log_softmax(0)[0].item(), abs=1e-6)


def test_temperature_zero_is_greedy_with_the_untempered_logprob():
    drawn = one(RowParameters(temperature=0.0), 0.999)
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx(LOGITS.log_softmax(0)[0].item(), abs=1e-6)


def test_each_id_is_drawn_as_often_as_its_probability_says():
    probabilities = LOGITS.softmax(0)
    number = 1000
    rows = [RowParameters(1.0)] * number
    uniforms = [(i + 0.5) / number for i in range(number)]
    ids = [drawn.token_id for drawn in draw(LOGITS.expand(number, -1), rows, uniforms)]
    for token_id, probability in enumerate(probabilities.tolist()):
        assert ids.count(token_id) == pytest.approx(probability * number, abs=1)


def test_penalties_are_taken_off_the_logits_before_the_temperature():
    logprobs = processed_logprobs(LOGITS[None], [RowParameters(0.5, penalties={0: 1.5, 3: -1.0})])[0]
    penalised = LOGITS - torch.tensor([1.5, 0.0, 0.0, -1.0])
    assert logprobs.tolist() == pytest.approx((penalised / 0.5).log_softmax(0).tolist(), abs=1e-6)
    assert one(RowParameters(0.0, penalties={0: 1.5})).token_id == 1


def test_a_penalty_counts_what_was_sampled_and_not_the_prompt():
    request = SampleRequest(prompt_ids=[7, 7], max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25)
    ids = [7, 7, 5, 5, 6]
    sequence = BatchSequence(request, random.Random(0), ids, cast("KvCache", None), num_sampled=3)
    assert sequence.parameters().penalties == {5: 1.0, 6: 0.75}


def test_top_k_renormalises_over_the_k_most_probable():
    logprobs = processed_logprobs(LOGITS[None], [RowParameters(1.0, top_k=2)])[0]
    assert logprobs[:2].tolist() == pytest.approx(LOGITS[:2].log_softmax(0).tolist(), abs=1e-6)
    assert logprobs[2:].tolist() == [-math.inf, -math.inf]


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    first = LOGITS.softmax(0)[0].item()
    just_reached = processed_logprobs(LOGITS[None], [RowParameters(1.0, top_p=first - 0.01)])[0]
    just_missed = processed_logprobs(LOGITS[None], [RowParameters(1.0, top_p=first + 0.01)])[0]
    assert just_reached.isfinite().tolist() == [True, False, False, False]
    assert just_missed.isfinite().tolist() == [True, True, False, False]


def test_top_p_is_measured_after_top_k():
    # Of the two that top-k leaves the first has 73 %, of all four only 60 %.
    logprobs = processed_logprobs(LOGITS[None], [RowParameters(1.0, top_p=0.7, top_k=2)])[0]
    assert logprobs.isfinite().tolist() == [True, False, False, False]


def test_banned_ids_have_no_probability_even_for_greedy():
    drawn = one(RowParameters(0.0, banned_ids=frozenset([0])))
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(LOGITS[1:].log_softmax(0)[0].item(), abs=1e-6)


def test_rows_do_not_see_each_others_parameters():
    rows = [RowParameters(0.0), RowParameters(1.0, top_k=1), RowParameters(0.3, num_top_logprobs=2)]
    together = draw(LOGITS.expand(3, -1), rows, [0.1, 0.9, 0.9])
    assert together == [one(row, uniform) for row, uniform in zip(rows, [0.1, 0.9, 0.9], strict=True)]


def test_top_logprobs_leave_out_what_was_excluded():
    drawn = one(RowParameters(1.0, top_k=2, num_top_logprobs=3))
    assert [token_id for token_id, _ in drawn.top_logprobs] == [0, 1]
