"""`gangline engine --model NAME`: the embedded engine behind the OpenAI routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gangline.models.engine_server.app import run_app
from gangline.models.language.models import resolve_model
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler


def create_sampler(
    model: str,
    *,
    threads: int | None = None,
    max_batch: int = 32,
    max_context: int | None = None,
    seed: int | None = None,
    device: str = "cpu",
    returns_masks: bool = False,
) -> EmbeddedSampler:
    """The sampler of `smollm2`, a folder, or a Hugging Face name. Takes seconds: call it off the event loop.

    Raises:
        NotFound: there is no such model here.
        EngineIncapable: its attention is not plain full attention.
    """
    folder = resolve_model(model)
    return EmbeddedSampler(
        LanguageModel(load_model(folder, device)),
        load_tokenizer(folder),
        model_name=model,
        max_batch=max_batch,
        max_context=max_context,
        seed=seed,
        threads=threads,
        returns_masks=returns_masks,
    )


async def serve(
    *,
    model: str,
    host: str,
    port: int,
    threads: int | None = None,
    max_batch: int = 32,
    max_context: int | None = None,
    seed: int | None = None,
    device: str = "cpu",
    returns_masks: bool = False,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Load the model and serve it until cancelled. `on_ready` is called with the base URL.

    Args:
        threads: CPU threads of one decode step; all cores but one where not given.
        max_batch: sequences that decode together; more of them wait.
        max_context: tokens of prompt and reply, where less than the model's own.
        device: as PyTorch names it.
        returns_masks: report the ids that top-k and top-p left, on the generate route.
        allowed_hosts: more names under which the server is reached.
        seed: of requests that bring none; the same order of requests then gives the same tokens.

    Raises:
        NotFound, EngineIncapable: see `create_sampler`.
        PortUnavailable: the address cannot be bound.
    """
    sampler = await asyncio.to_thread(
        create_sampler,
        model,
        threads=threads,
        max_batch=max_batch,
        max_context=max_context,
        seed=seed,
        device=device,
        returns_masks=returns_masks,
    )
    await run_app(sampler, host=host, port=port, allowed_hosts=allowed_hosts, on_ready=on_ready)
