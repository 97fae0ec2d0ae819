"""The bytes of a known model's token ids, loaded by a separate process: tokenizers take seconds to import, and a page
must not block the server.

Run as `python -m gangline.server.web.vocabulary MODEL` it writes the vocabulary to stdout, as MessagePack.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable

import msgspec

from gangline.server.web.tokens import TokenBytes

log = logging.getLogger("gangline.server.web")

KNOWN_MODELS = ("smollm2",)
"""Models whose tokenizer is found by name. Names in records come from harnesses, so no other name is looked up."""

_PATIENCE_S = 60.0


class Vocabularies:
    """Each known model's vocabulary, loaded once. Bound to one event loop."""

    def __init__(self) -> None:
        self._loading: dict[str, asyncio.Task[TokenBytes]] = {}

    def begin(self, models: Iterable[str]) -> None:
        """Start loading in the background, so that `of` does not wait later."""
        for model in set(models) & set(KNOWN_MODELS) - set(self._loading):
            self._loading[model] = asyncio.create_task(_load(model), name=f"vocabulary {model}")

    async def of(self, models: Iterable[str]) -> TokenBytes:
        """The vocabulary of the first known model; empty if there is none, or it cannot be loaded."""
        wanted = sorted(set(models) & set(KNOWN_MODELS))
        self.begin(wanted)
        return await asyncio.shield(self._loading[wanted[0]]) if wanted else {}

    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)


async def _load(model: str) -> TokenBytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gangline.server.web.vocabulary", model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            out, errors = await process.communicate()
    except TimeoutError:
        out, errors = b"", b"it took too long"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        log.info("vocabulary.unknown model=%s why=%.200s: the page shows ids without their text", model, last)
        return {}
    return dict(enumerate(msgspec.msgpack.decode(out, type=list[bytes])))


def _main(model: str) -> None:
    from gangline.models.language.tokenizer import load_tokenizer  # noqa: PLC0415 - the server imports this module without it

    sys.stdout.buffer.write(msgspec.msgpack.encode(load_tokenizer(model).vocabulary()))


if __name__ == "__main__":
    _main(sys.argv[1])
