"""The services of a running sandbox, from outside: containers are addressed by name."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from gangline.domain.errors import LimitExceeded, NotFound, RuntimeFailed
from gangline.domain.sandbox import ExecResult
from gangline.sandbox.containers.engine import Engine, container_name

_COPY_S = 120.0
_MAX_COMPLAINT_BYTES = 4096
_NO_FILE = re.compile("could not find|no such file|not be found", re.IGNORECASE)


class ContainerServices:
    """See `gangline.domain.sandbox.SideServices`."""

    def __init__(self, engine: Engine, runtime_id: str, names: Sequence[str]) -> None:
        """names: of all services, in the order of the specification."""
        self._engine = engine
        self._containers = {name: container_name(runtime_id, f"service-{at}") for at, name in enumerate(names, 1)}

    def _container(self, service: str) -> str:
        """Raises: RuntimeFailed: the task is wrong, so it must not lead to a reward."""
        if service not in self._containers:
            raise RuntimeFailed(f"the sandbox has no service {service!r}, but {', '.join(self._containers)}.")
        return self._containers[service]

    async def exec(
        self, service: str, command: str, *, timeout_s: float, user: str | None = None, max_output_bytes: int = 1 << 16
    ) -> ExecResult:
        options = [] if user is None else ["--user", user]
        argv = ["exec", *options, self._container(service), "sh", "-c", command]
        began_at = time.monotonic()
        async with self._engine.program(*argv) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                async with asyncio.timeout(timeout_s):
                    stdout, stderr = await asyncio.gather(
                        _front(process.stdout, max_output_bytes), _front(process.stderr, max_output_bytes)
                    )
                    code = await process.wait()
            except TimeoutError:
                return ExecResult(exit_code=None, timed_out=True, duration_s=time.monotonic() - began_at)
        is_cut = max(len(stdout), len(stderr)) > max_output_bytes
        return ExecResult(
            exit_code=code,
            stdout=stdout[:max_output_bytes],
            stderr=stderr[:max_output_bytes],
            truncated=is_cut,
            duration_s=time.monotonic() - began_at,
        )

    async def archive(self, service: str, path: str, *, max_bytes: int) -> bytes:
        async with self._engine.program("cp", f"{self._container(service)}:{path}", "-") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                async with asyncio.timeout(_COPY_S):
                    archive, complaint = await asyncio.gather(
                        _whole(process.stdout, path, max_bytes), _front(process.stderr, _MAX_COMPLAINT_BYTES)
                    )
                    code = await process.wait()
            except TimeoutError:
                raise RuntimeFailed(f"{path} of service {service!r} was not copied within {_COPY_S:.0f} s.") from None
        if code != 0:
            errors = complaint.decode(errors="replace").strip()
            kind = NotFound if _NO_FILE.search(errors) else RuntimeFailed
            raise kind(f"{path} of service {service!r} could not be copied: {errors}")
        return archive


async def _front(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read to the end and keep at most `max_bytes` + 1 bytes."""
    kept = bytearray()
    while data := await stream.read(1 << 16):
        kept += data[: max_bytes + 1 - len(kept)]
    return bytes(kept)


async def _whole(stream: asyncio.StreamReader, path: str, max_bytes: int) -> bytes:
    """Raises: LimitExceeded."""
    kept = bytearray()
    while data := await stream.read(1 << 16):
        kept += data
        if len(kept) > max_bytes:
            raise LimitExceeded(f"{path} takes more than {max_bytes} bytes")
    return bytes(kept)
