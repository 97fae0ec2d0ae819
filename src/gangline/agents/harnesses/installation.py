"""Agent programs as packages: an adapter's program, its version check, and its installation for all sandboxes.

All are in the tools folder (`GANGLINE_TOOLS`), which every sandbox can read and whose programs come first in its PATH.
Programs from npm share one `node_modules`; if the machine's Node is too old for one of them, a newer Node from npm is
installed too. `npm-lock.json` has the versions and hashes of all dependencies of the adapters' pinned versions.
Packages run no install scripts, except those whose adapter declares that they need one. Each program from PyPI has its
own virtual environment, `python/COMMAND`, made by uv or pip; `bin` contains a link to its command, if it has one, and
`COMMAND-python`, the Python with its packages. (`uv tool install` is not usable: it refuses a library without
commands.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator

from gangline.agents.harnesses.shared.evidence import describe_exit
from gangline.domain.errors import HarnessError, InvalidRequest
from gangline.domain.sandbox import Sandbox
from gangline.machine.durable import locked
from gangline.settings import plugins

log = logging.getLogger("gangline.harness")

_NEWER_NODE = "node@22"
_LOCK = Path(__file__).with_name("npm-lock.json")
_CHECK_TIMEOUT_S = 60.0
_INSTALL_TIMEOUT_S = 1800.0
_START_TIMEOUT_S = 30.0
# Prints the Python with a program's packages: `COMMAND-python`, or the one that runs a command installed in an image.
_FIND_PYTHON = 'command -v {0}-python || sed -n "1s/^#! *//p" "$(command -v {0})" 2>/dev/null'
_TELL_VERSION = """
import sys
from importlib import metadata
try:
    print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:
    sys.exit(3)
"""
# Exit code 127 is a shell's for a missing program; here it means that the package is not installed.
_ASK_PYTHON = """
python=$({find}); [ -n "$python" ] || exit 127
$python -c "$1" "$2"; code=$?
case $code in 3) exit 127;; 127) exit 126;; *) exit $code;; esac
"""

_VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")

ProgramVersion = Annotated[
    str | None, BeforeValidator(lambda text: (text.strip() or None) if isinstance(text, str) else text)
]
"""A setting: the required version. None, or an empty text from a rendered template: any."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The class attribute `program` of an adapter, which declares its program."""

    harness: str
    """Name of the adapter, as for `gangline harness install`."""
    command: str
    """Name of the command; a program from npm prints its version with `--version`. A plain library has a name under
    which its Python is found.
    """
    source: Literal["npm", "pypi"]
    package: str
    version: str
    """The version that the adapter was written for and that is installed."""
    beside: tuple[str, ...] = ()
    """Further requirements, with versions, that are not dependencies of the package."""
    oldest: tuple[int, int]
    """Oldest supported Node or Python: major and minor number."""
    env: Mapping[str, str] = {}
    """Variables that keep the version query from doing anything else."""
    executables: tuple[str, ...] = ()
    """Shell patterns, relative to the package's folder, of bundled programs that npm unpacks without the execute
    bit.
    """
    needs_script: bool = False
    """Whether a package from npm works only after its install script has run."""

    def requirements(self, version: str | None = None) -> tuple[str, ...]:
        """The requirements in the syntax of npm or pip."""
        mark = "@" if self.source == "npm" else "=="
        return (f"{self.package}{mark}{version or self.version}", *self.beside)

    def install_line(self, version: str | None = None) -> str:
        """The command to run on nodes with the tools folder, and the one for building an image."""
        option = "" if version in (None, self.version) else f" --version {version}"
        tool = "npm install --global" if self.source == "npm" else "pip install"
        return (
            f"gangline harness install {self.harness}{option} (in an image: {tool} "
            f"{' '.join(self.requirements(version))})"
        )


def program_of(harness: str) -> Program | None:
    """The program of the named adapter; None if it has no separate program. Raises: UnknownPlugin."""
    return getattr(plugins.load("harness", harness), "program", None)


def npm_requirements() -> list[str]:
    """All npm requirements of the adapters, in npm's syntax."""
    programs = (program_of(name) for name in plugins.names("harness"))
    named = [
        requirement
        for program in programs
        if program and program.source == "npm"
        for requirement in program.requirements()
    ]
    return [*named, _NEWER_NODE]


def find_program(harness: str) -> Program:
    """Raises: UnknownPlugin; InvalidRequest if the harness has no program to install."""
    program = program_of(harness)
    if program is None:
        raise InvalidRequest(f"harness {harness!r} has no program of its own to install.")
    return program


async def check_program(runtime: Sandbox, program: Program, wanted: str | None) -> str:
    """The version of the program in a runtime. `wanted`: the only one that will do; None takes any.

    Raises: HarnessError with the command that installs it, if it is missing, does not start, or has the wrong version.
    """
    command, install_line = program.command, f"Run: {program.install_line(wanted)}"
    result = await runtime.exec(_version_question(program), env=program.env, timeout_s=_CHECK_TIMEOUT_S)
    if result.exit_code == 127:
        raise HarnessError(f"{command} is not installed where the runtime looks for it. {install_line}")
    if not result.ok:
        needs = f"{'Node' if program.source == 'npm' else 'Python'} {program.oldest[0]}.{program.oldest[1]} or later"
        raise HarnessError(f"{command} does not start (it needs {needs}): {describe_exit(result)}. {install_line}")
    # Some programs print it on stderr.
    versions = _VERSION.findall((result.stdout + result.stderr).decode(errors="replace"))
    if wanted is not None and wanted not in versions:
        raise HarnessError(
            f"{command} {versions[0] if versions else 'of an unknown version'} is installed, the task wants {wanted}. "
            f"{install_line}, or set `version` in the agent's settings."
        )
    return wanted or (versions[0] if versions else "")


def _version_question(program: Program) -> str | list[str]:
    """Packages from PyPI are looked up by name: some programs take seconds to start, or print no version."""
    if program.source == "npm":
        return f"command -v {program.command} >/dev/null || exit 127; {program.command} --version"
    ask = _ASK_PYTHON.format(find=_FIND_PYTHON.format(program.command))
    return ["sh", "-c", ask, "sh", _TELL_VERSION, program.package]


def python_command(program: Program, script: str) -> list[str]:
    """The command that runs a script in the runtime with the program's Python."""
    return ["sh", "-c", f'exec $({_FIND_PYTHON.format(program.command)}) "$@"', "sh", script]


def installed_version(program: Program, tools: Path) -> str | None:
    """Version of the program in the tools folder; None if it is missing."""
    if program.source == "npm":
        try:
            package: dict[str, Any] = json.loads((_modules(tools) / program.package / "package.json").read_bytes())
        except (OSError, ValueError):
            return None
        return str(package.get("version"))
    name = re.sub(r"[-_.]+", "_", program.package).lower()
    for folder in _environment(tools, program).glob("lib/python3*/site-packages/*.dist-info"):
        package_name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if re.sub(r"[-_.]+", "_", package_name).lower() == name:
            return version
    return None


def install(programs: Iterable[tuple[Program, str | None]], tools: Path) -> None:
    """Install programs, each with the given version or its own. Programs that are already installed are not touched.

    Raises: HarnessError, with the message of npm or pip.
    """
    tools.mkdir(parents=True, exist_ok=True)
    with _alone(tools):
        chosen = list(programs)
        wanted = [one for one in chosen if installed_version(one[0], tools) != (one[1] or one[0].version)]
        _install_npm([one for one in wanted if one[0].source == "npm"], tools)
        for program, version in wanted:
            if program.source == "pypi":
                _install_pypi(program, version, tools)
        for program, _ in chosen:
            for pattern in program.executables:
                for bundled in (_modules(tools) / program.package).glob(pattern):
                    bundled.chmod(bundled.stat().st_mode | 0o111)


@contextlib.contextmanager
def _alone(tools: Path) -> Generator[None]:
    with locked(tools / ".installing", wait=True):
        yield


# -- npm ---------------------------------------------------------------------------------------------------------


def _install_npm(wanted: Sequence[tuple[Program, str | None]], tools: Path) -> None:
    """Install all at once: each call of npm walks the whole folder."""
    if not wanted:
        return
    if shutil.which("npm") is None:
        raise HarnessError("npm is missing: install Node.js 20 or later, which brings it.")
    oldest = max(program.oldest for program, _ in wanted)
    if _node_version(tools) < oldest:
        _npm([_NEWER_NODE], ["node"], tools)  # first: the others' install scripts run under it
    if _node_version(tools) < oldest:
        raise HarnessError(f"no Node {oldest[0]}.{oldest[1]} or later came with {_NEWER_NODE}: install one.")
    requirements = [requirement for program, version in wanted for requirement in program.requirements(version)]
    _npm(requirements, [program.package for program, _ in wanted if program.needs_script], tools)


def _npm(requirements: Sequence[str], with_scripts: Sequence[str], tools: Path) -> None:
    """with_scripts: packages whose install scripts are run."""
    shutil.copy(_LOCK, tools / "package-lock.json")  # npm uses the entries that it needs
    npm = ["npm", "--prefix", str(tools), "--loglevel=error"]
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--save-exact")
    _run([*npm, "install", *options, *requirements], env=_with_tools(tools))
    if with_scripts:
        _run([*npm, "rebuild", *with_scripts], env=_with_tools(tools))


def _node_version(tools: Path) -> tuple[int, int]:
    """Version of the Node that runs programs in the tools folder; (0, 0) if there is none."""
    node = shutil.which("node", path=_with_tools(tools)["PATH"])
    if node is None:
        return (0, 0)
    output = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.match(r"v(\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _modules(tools: Path) -> Path:
    return tools / "node_modules"


def _with_tools(tools: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{_modules(tools) / '.bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


# -- PyPI --------------------------------------------------------------------------------------------------------


def _install_pypi(program: Program, version: str | None, tools: Path) -> None:
    folder = _environment(tools, program)
    try:
        _fill_environment(folder, python_for(program), program.requirements(version))
    except BaseException:  # Ctrl-C too: a partial folder would count as installed
        shutil.rmtree(folder, ignore_errors=True)
        raise
    bin_folder, inner = tools / "bin", Path("..") / folder.relative_to(tools) / "bin"
    bin_folder.mkdir(exist_ok=True)
    link, python = bin_folder / program.command, bin_folder / f"{program.command}-python"
    link.unlink(missing_ok=True)
    if (folder / "bin" / program.command).exists():
        link.symlink_to(inner / program.command)
    # Not a link: Python locates its environment from the name by which it was called.
    python.write_text(f'#!/bin/sh\nexec "$(dirname "$0")/{inner}/python" "$@"\n')
    python.chmod(0o755)


def _fill_environment(folder: Path, python: str, requirements: Sequence[str]) -> None:
    """Create an environment with the requirements: with uv if it is in PATH, which is much faster, else with pip. pip
    is also used if uv fails, because uv reads neither pip's configuration nor its credentials.
    """
    if (uv := shutil.which("uv")) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        inside = str(folder / "bin" / "python")
        try:
            _run([uv, "venv", "--quiet", "--python", python, str(folder)])
            # Sandboxes see the folder read-only: without bytecode each start would compile everything.
            _run([uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", inside, *requirements])
        except HarnessError as error:
            log.warning("harness.uv_failed message=%s", error)
        else:
            return
    shutil.rmtree(folder, ignore_errors=True)
    _run([python, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements])


def _environment(tools: Path, program: Program) -> Path:
    return tools / "python" / program.command


def python_for(program: Program) -> str:
    """A Python that is new enough and starts. Raises: HarnessError."""
    if sys.version_info[:2] >= program.oldest:
        return sys.executable
    major, oldest_minor = program.oldest
    for minor in range(oldest_minor, oldest_minor + 10):
        if (found := shutil.which(f"python{major}.{minor}")) and _starts(found):
            return found
    raise HarnessError(f"{program.command} needs Python {major}.{oldest_minor} or later, and none in PATH starts.")


def _starts(python: str) -> bool:
    """Whether it runs: pyenv and asdf put a shim for every version in PATH, selected or not."""
    try:
        done = subprocess.run([python, "-c", ""], capture_output=True, timeout=_START_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()[-1500:]
        raise HarnessError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{output}")
