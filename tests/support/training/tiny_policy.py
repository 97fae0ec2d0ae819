"""A tiny random model that the embedded engine serves and a trainer trains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gangline.domain.errors import EngineUnavailable
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.weights.update import ServiceWeights
from support.engines.models import CONFIGS

__all__ = ["tiny_policy", "until_served"]

_LAST_TOKEN = "</think>"


def tiny_policy(folder: Path, **changes: Any) -> int:
    """Write it; the number of words that its tokenizer knows."""
    num_words = TinyTokenizer().encode(_LAST_TOKEN)[0] + 1
    shape: dict[str, Any] = {**CONFIGS["llama"].to_dict(), "vocab_size": num_words, "initializer_range": 0.1} | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)
    return num_words


async def until_served(weights: ServiceWeights) -> int:
    """Its version, as soon as the server has heard of the node."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await weights.latest_version() or 0
            except EngineUnavailable:
                await asyncio.sleep(0.05)
