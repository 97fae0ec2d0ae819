"""Both runtimes keep the contract, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.contracts import Runtime
from gangline.domain.errors import RuntimeUnavailable
from gangline.runtimes.process import ProcessRuntime
from gangline.runtimes.sandbox import SandboxRuntime
from gangline.testing.runtime_conformance import CHECKS, Check, run_check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [SandboxRuntime, ProcessRuntime], ids=["sandbox", "process"])
async def test_runtime(kind: type[Runtime], check: Check, tmp_path: Path) -> None:
    runtime = kind()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    if not await run_check(check, runtime, tmp_path, isolated=kind is SandboxRuntime):
        pytest.skip("promises no isolation")
