"""Both runtimes keep the contract, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.sandbox import Runtime
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.process import ProcessRuntime
from gangline.testing.runtime_conformance import Check, checks, run_check

CASES = [
    pytest.param(kind, check, id=f"{kind.name}-{check.__name__}")
    for kind in (BubblewrapRuntime, ProcessRuntime)
    for check in checks(isolated=kind is BubblewrapRuntime)
]


@pytest.mark.parametrize(("kind", "check"), CASES)
async def test_runtime(kind: type[Runtime], check: Check, tmp_path: Path) -> None:
    runtime = kind()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    await run_check(check, runtime, tmp_path, isolated=kind is BubblewrapRuntime)
