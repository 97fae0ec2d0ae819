"""A Qwen2-VL of random weights: real architecture, real image processor, Qwen3's tokenizer, Qwen3-VL's chat template.

It says nothing that makes sense. It is good for one thing: its log-probs depend on the pixels.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from support.engines.tokenizers import qwen3_folder, template_text

__all__ = ["IMAGE_ID", "load_model", "write_model"]

IMAGE_ID = 151_655
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
    "temporal_patch_size": 2,
}


def write_model(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    text: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID)
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), encoding="utf-8")
    source = Path(qwen3_folder())
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template_text("qwen3_vl")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load_model(folder: Path) -> Qwen2VLForConditionalGeneration:
    loader: Any = Qwen2VLForConditionalGeneration
    return loader.from_pretrained(str(folder), dtype=torch.float32).eval()
