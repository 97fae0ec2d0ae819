"""The running batch against transformers' own `generate` and teacher forcing, on small models of two families."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from gangline.domain.errors import Conflict, InvalidRequest, NotFound
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.serving.embedded.batch import Batch, Sequence
from gangline.serving.embedded.model import Chunk, LanguageModel, load_model
from gangline.serving.embedded.scoring import score_logprobs
from support.engines.models import VOCAB_SIZE, greedy, reference_model, write_tiny_model

Tokens = dict[Sequence, list[SampledToken]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return reference_model(folder)


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return LanguageModel(load_model(folder))


class CountingModel(LanguageModel):
    """Counts the tokens that went through the model."""

    num_tokens = 0

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        self.num_tokens += sum(len(chunk.ids) for chunk in chunks)
        return super().forward(chunks)


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def ask(prompt_ids: list[int], number: int = 12, **fields: object) -> SampleRequest:
    return SampleRequest(**{"prompt_ids": prompt_ids, "max_tokens": number, "temperature": 0.0, **fields})


def run(batch: Batch, tokens: Tokens | None = None, steps: int | None = None) -> Tokens:
    tokens = defaultdict(list) if tokens is None else tokens
    while batch.has_work and steps != 0:
        for sequence, token in batch.step():
            tokens[sequence].append(token)
        steps = None if steps is None else steps - 1
    return tokens


def ids_of(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def test_sequences_that_join_and_leave_do_not_change_each_others_tokens(
    model: LanguageModel, reference: PreTrainedModel
):
    batch = Batch(model, max_batch=4)
    wanted = {}
    tokens: Tokens = defaultdict(list)
    # Short and long ones, more than fit, one every second step: someone joins or leaves nearly always.
    for i, (length, number) in enumerate([(5, 3), (300, 20), (40, 1), (17, 25), (9, 8), (700, 5), (2, 30), (60, 12)]):
        wanted[batch.add(ask(prompt(length, i), number), seed=i)] = greedy(reference, prompt(length, i), number)
        run(batch, tokens, steps=2)
    run(batch, tokens)
    assert {sequence: ids_of(tokens[sequence]) for sequence in wanted} == wanted


def test_a_recorded_logprob_is_the_teacher_forced_one(model: LanguageModel, reference: PreTrainedModel):
    batch = Batch(model)
    requests = [ask(prompt(n, n), 20, temperature=0.7, top_p=p) for n, p in [(3, 1.0), (50, 0.9), (290, 1.0)]]
    sequences = [batch.add(request, seed=i) for i, request in enumerate(requests)]
    tokens = run(batch)
    for sequence, request in zip(sequences, requests, strict=True):
        recorded = [token.logprob for token in tokens[sequence]]
        for scorer in (reference, model.module):
            scored = score_logprobs(scorer, sequence.ids, 0.7, top_p=request.top_p)[-20:]
            assert scored.tolist() == pytest.approx(recorded, abs=1e-4)


def test_scoring_in_chunks_equals_one_forward_pass(model: LanguageModel, reference: PreTrainedModel):
    ids = prompt(900)
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([ids])).logits[0, :-1]
    whole = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for scorer in (reference, model.module):
        scored = score_logprobs(scorer, ids, 1.0)
        assert scored[0] == 0
        assert torch.allclose(scored[1:], whole, atol=1e-4)


def test_a_group_of_samples_computes_its_prompt_once(folder: Path):
    model = CountingModel(load_model(folder))
    batch = Batch(model)
    sequences = [batch.add(ask(prompt(600), 5, temperature=1.0), seed=i) for i in range(8)]
    tokens = run(batch)
    # The prompt once; for the others their last prompt token; then four decoded tokens each.
    assert model.num_tokens == 600 + 7 + 8 * 4
    assert len({tuple(ids_of(tokens[sequence])) for sequence in sequences}) > 1


def test_a_second_turn_computes_only_what_is_new(folder: Path, reference: PreTrainedModel):
    model = CountingModel(load_model(folder))
    batch = Batch(model)
    first = batch.add(ask(prompt(100), 10), seed=0)
    run(batch)
    second_prompt = [*first.ids, *prompt(20, seed=9)]
    before = model.num_tokens
    second = batch.add(ask(second_prompt, 6), seed=0)
    tokens = run(batch)
    # The last sampled id of the first turn never went through the model, nor does the last one of this turn.
    assert model.num_tokens - before == 1 + 20 + 5
    assert ids_of(tokens[second]) == greedy(reference, second_prompt, 6)


def test_a_long_prompt_does_not_hold_up_those_who_decode(model: LanguageModel):
    batch = Batch(model)
    running = batch.add(ask(prompt(5), 50), seed=0)
    run(batch, steps=1)
    batch.add(ask(prompt(900, seed=1), 2), seed=0)
    tokens = run(batch, steps=3)
    assert {sequence: len(got) for sequence, got in tokens.items()} == {running: 3}


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model: LanguageModel):
    request = ask(prompt(30), 20, temperature=1.0)
    alone = Batch(model)
    sequence = alone.add(request, seed=7)
    wanted = ids_of(run(alone)[sequence])
    crowd = Batch(model)
    for i in range(5):
        crowd.add(ask(prompt(11 * i + 3, i), 9, temperature=1.3), seed=i)
    same, other = crowd.add(request, seed=7), crowd.add(request, seed=8)
    tokens = run(crowd)
    assert ids_of(tokens[same]) == wanted
    assert ids_of(tokens[other]) != wanted


def test_a_stop_id_ends_the_sequence_and_is_part_of_it(model: LanguageModel, reference: PreTrainedModel):
    wanted = greedy(reference, prompt(20), 12)
    stop = wanted[4]
    batch = Batch(model)
    sequence = batch.add(ask(prompt(20), 12, stop_ids=frozenset([stop])), seed=0)
    tokens = run(batch)[sequence]
    assert ids_of(tokens) == wanted[: wanted.index(stop) + 1]
    assert [token.finish_reason for token in tokens][-1] == "stop"
    assert batch.num_running == 0


def test_min_tokens_keeps_stop_ids_away(model: LanguageModel, reference: PreTrainedModel):
    stop = greedy(reference, prompt(20), 1)[0]
    batch = Batch(model)
    sequence = batch.add(ask(prompt(20), 6, stop_ids=frozenset([stop]), min_tokens=4), seed=0)
    assert stop not in ids_of(run(batch)[sequence])[:4]


def test_the_context_limit_ends_a_sequence_with_length(model: LanguageModel):
    batch = Batch(model, context_length=32)
    sequence = batch.add(ask(prompt(25), 100), seed=0)
    tokens = run(batch)[sequence]
    assert len(tokens) == 7
    assert [token.finish_reason for token in tokens] == [None] * 6 + ["length"]


def test_new_weights_mid_sequence_draw_as_if_they_had_always_been_there(
    model: LanguageModel, reference: PreTrainedModel, folder: Path, tmp_path: Path
):
    family = reference.config.model_type
    other = write_tiny_model(tmp_path, family, seed=1)
    batch = Batch(model)
    sequence = batch.add(ask(prompt(40), 12), seed=0)
    tokens = run(batch, steps=5)
    batch.pause("keep")
    batch.load_weights(other)
    batch.version = 3
    assert not batch.has_work
    batch.resume()
    run(batch, tokens)
    drawn = tokens[sequence]
    assert [token.version for token in drawn] == [0] * 5 + [3] * 7
    before = greedy(reference, prompt(40), 5)
    assert ids_of(drawn) == before + greedy(reference_model(other), prompt(40) + before, 7)
    again = batch.add(ask(prompt(40), 5), seed=0)
    assert ids_of(run(batch)[again]) != before


def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    model: LanguageModel, reference: PreTrainedModel, tmp_path: Path
):
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    unlike = {"llama": "qwen3", "qwen3": "llama"}[reference.config.model_type]
    write_tiny_model(tmp_path / "unlike", unlike, seed=1)
    (tmp_path / "empty").mkdir()
    batch = Batch(model)
    batch.pause("keep")
    with pytest.raises(InvalidRequest, match="does not fit"):
        batch.load_weights(tmp_path / "unlike")
    with pytest.raises(NotFound, match="safetensors"):
        batch.load_weights(tmp_path / "empty")
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())


def test_weights_are_loaded_only_while_paused(model: LanguageModel, folder: Path):
    batch = Batch(model)
    with pytest.raises(Conflict, match="paused"):
        batch.load_weights(folder)
    batch.add(ask(prompt(4)), seed=0)
    batch.pause("wait")
    with pytest.raises(Conflict, match="paused"):
        batch.load_weights(folder)


def test_loading_weights_leaves_the_model_folder_alone(model: LanguageModel, folder: Path, tmp_path: Path):
    before = (folder / "model.safetensors").read_bytes()
    family = "llama" if model.module.config.model_type == "llama" else "qwen3"
    model.load_weights(write_tiny_model(tmp_path, family, seed=1))
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_pass_happens_on_the_models_device(folder: Path) -> None:
    """PyTorch's device `meta` computes shapes alone, and refuses tensors of other devices."""
    model = LanguageModel(load_model(folder, "meta"))
    cache = model.new_cache()
    for part in (prompt(70), prompt(5), prompt(1)):  # a prompt beyond one allocation, a later chunk, a decoded token
        assert model.forward([Chunk(cache, np.asarray(part, dtype=np.int64))]).device.type == "meta"
    assert (cache.length, cache.keys.device.type, cache.values.device.type) == (76, "meta", "meta")


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot use the device 'cuda:99'"):
        load_model(folder, "cuda:99")
    with pytest.raises(InvalidRequest, match="cannot use the device 'abacus'"):
        load_model(folder, "abacus")


def test_a_gpu_reads_more_of_a_prompt_in_one_pass(folder: Path, model: LanguageModel) -> None:
    assert LanguageModel(load_model(folder, "meta")).prompt_tokens > model.prompt_tokens


def test_what_broken_weights_computed_harms_nobody_after_good_ones(
    model: LanguageModel, reference: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    """A sequence that comes later may stand where a longer one left numbers that are not finite."""
    load_model(folder).save_pretrained(tmp_path / "good")
    broken = load_model(folder)
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(torch.nan)
    broken.save_pretrained(tmp_path / "broken")
    batch = Batch(model)
    gone, stays = (batch.add(ask(prompt(40, seed), 60), seed=0) for seed in (1, 2))
    batch.pause("keep")
    batch.load_weights(tmp_path / "broken")
    batch.resume()
    run(batch, steps=15)
    batch.remove(gone)
    batch.pause("keep")
    batch.load_weights(tmp_path / "good")
    batch.resume()
    late = batch.add(ask(prompt(5), 8), seed=0)
    tokens = run(batch)
    assert stays in tokens
    assert ids_of(tokens[late]) == greedy(reference, prompt(5), 8)
