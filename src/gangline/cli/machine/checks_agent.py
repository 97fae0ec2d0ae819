"""The check of `gangline doctor` in the Python that agents run with, as a sandbox sees it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from gangline.cli.machine.checks import Check
from gangline.domain.contracts import ExecResult, RuntimeStart
from gangline.domain.errors import GanglineError
from gangline.domain.ids import new_id
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.settings.plugins import make_runtime

__all__ = ["check_agent_python"]

_SDKS = ("openai", "anthropic", "google.genai", "langgraph", "pydantic_ai", "agents", "smolagents", "mcp")
_LOOK = f"""
import importlib.util, json, platform, sys
def can_import(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
found = [name for name in {_SDKS!r} if can_import(name)]
print(json.dumps({{"version": platform.python_version(), "path": sys.executable, "modules": found}}))
"""
_TIMEOUT_S = 30.0
_NAME = "agents' python"


class _Interpreter(msgspec.Struct, frozen=True):
    version: str
    path: str
    modules: tuple[str, ...]


def check_agent_python(python: Path | None) -> Check:
    """Start `python3` in a sandbox. python: the environment of `submit --python`; None is the usual interpreter."""
    try:
        with tempfile.TemporaryDirectory(prefix="gangline-doctor-") as folder:
            result = asyncio.run(_look(Path(folder), None if python is None else str(python.absolute())))
    except GanglineError as error:
        return Check(name=_NAME, state="optional", found="cannot be examined", advice=error.message)
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        advice = "let every user read the environment (chmod -R a+rX), or name another one with --python VENV"
        return Check(name=_NAME, state="missing" if python else "optional", found=said[0][:300], advice=advice)
    found = msgspec.json.decode(result.stdout, type=_Interpreter)
    modules = f"imports {', '.join(found.modules)}" if found.modules else "imports none of the common SDKs"
    advice = "" if found.modules else "give agents an environment with their packages: gangline submit --python VENV"
    state = "ok" if found.modules else "optional"
    return Check(name=_NAME, state=state, found=f"{found.version} at {found.path}; {modules}", advice=advice)


async def _look(folder: Path, python: str | None) -> ExecResult:
    """Raises: GanglineError when no sandbox starts, or the folder is no environment."""
    runtime = make_runtime("sandbox")
    limits = LimitsSpec(**dict.fromkeys(LimitsSpec.model_fields))
    spec = RuntimeSpec(network="none", limits=limits, python=python)
    start = RuntimeStart(runtime_id=new_id("doctor"), owner="doctor", spec=spec, folder=folder / "sandbox")
    handle = await runtime.start(start)
    try:
        return await handle.exec(["python3", "-c", _LOOK], timeout_s=_TIMEOUT_S)
    finally:
        await handle.stop()
