"""A trainer as its own process: `python weight_trainer.py SERVER_URL TOKEN FOLDER VERSION LEASE_S` pushes once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.server import ServerClient


def save(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


async def main(url: str, token: str, folder: str, version: str, lease_s: str) -> None:
    async with ServerClient(url, token) as service:
        weights = ServiceWeights(service, Path(folder), token=token, lease_s=float(lease_s))
        await weights.push(save, int(version))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
