"""Requirements on every harness adapter, as checks that any adapter's author can run.

    SUBJECT = Subject(
        harness=MyHarness,
        settings={"thinking": "low"},
        worked=ExecResult(exit_code=0, stdout=recorded_events),
        failed={"its API was down": ExecResult(exit_code=0, stdout=other_events)},
    )

    @pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
    async def test_my_harness(check, tmp_path):
        await run_check(check, SUBJECT, tmp_path)

The program itself is not needed: a stand-in with its name prints its version, and records its input. `worked` and
`failed` are recorded outputs of the real program. A failed check raises AssertionError with the expectation.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from pydantic import ValidationError

from gangline.agents.harnesses.installation import Program
from gangline.domain.contracts import Harness, HarnessContext, Launch, Logged, SupportsCapabilities
from gangline.domain.errors import HarnessError
from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecResult, RuntimeStart, Sandbox
from gangline.domain.task import McpServer, RuntimeSpec
from gangline.sandbox.process import ProcessRuntime
from gangline.settings.machine import Settings

_PATIENCE_S = 60.0
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_KEY, _MODEL, _BASE_URL = "key-of-this-session", "org/model:1", "http://127.0.0.1:8642/s/s1"
_MCP_COMMAND, _SKILL = "gangline-test-server", "How to steer a sled: with your weight."

INSTRUCTIONS = {
    "a leading dash": "--help me, -p and -- alike",
    "an at sign": "@file.txt is not a file",
    "quotes": "say 'it'\"s\" `here`",
    "shell text": "$(touch pwned) ${HOME} && ; | \\n \\\\ {model} {instruction}",
    "unicode": "grüße 雪橇犬 🐕‍🦺 \u202e",
    "lines": "one\n\ntwo\n\tthree",
    "a slash command": "/help",
}
"""Difficult instructions: each must arrive unchanged."""
_LONG = "a long way, " * 20_000
_OTHER_VALUES: tuple[Any, ...] = (None, 1, "x", [], {}, [None], {"x": []})

_STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"] or sys.argv[1:2] == ["-c"]:
    print("{command} {version}")
    sys.exit({version_exit})
given = {{"argv": sys.argv[1:], "stdin": sys.stdin.buffer.read().decode(), "env": dict(os.environ)}}
with open({noted!r}, "w") as file:
    json.dump(given, file)
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An adapter, and facts about its program."""

    harness: type[Harness]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Valid settings to use in the checks."""
    commands: tuple[str, ...] = ()
    """Names of further commands that it starts, in addition to its declared program's."""
    worked: ExecResult
    """A run that finished."""
    failed: Mapping[str, ExecResult]
    """Runs that failed: event -> remaining output. At least: its model API failed, and it ended by its own fault."""


class Given(msgspec.Struct, frozen=True):
    """The stand-in's recorded input."""

    argv: list[str]
    stdin: str
    env: dict[str, str]


class Bench:
    """Creates runtimes in which a stand-in replaces the subject's program."""

    def __init__(self, subject: Subject, root: Path) -> None:
        self.subject = subject
        self.root = root
        self.program: Program | None = getattr(subject.harness, "program", None)
        self._tools = root / "tools"
        self._noted = root / "noted.json"
        self._owner = new_id("conformance")
        self._sandboxes: list[Sandbox] = []
        self._owner = new_id("conformance")  # stopping kills by label: another run's processes must not have it
        self.install()

    def make(self, **settings: Any) -> Harness:
        harness: Any = self.subject.harness
        return harness(harness.Config.model_validate({**self.subject.settings, **settings}))

    def install(self, version: str | None = None, *, starts: bool = True) -> None:
        """Install stand-ins for all its commands. `version`: overrides the declared one."""
        commands = [*self.subject.commands, *([self.program.command] if self.program else [])]
        if self.program and self.program.source == "pypi":
            commands.append(f"{self.program.command}-python")
        folder = self._tools / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            text = _STAND_IN.format(
                python=sys.executable,
                command=command,
                version=(version or (self.program.version if self.program else "1.0.0")) if starts else "it is broken",
                version_exit=0 if starts else 1,
                noted=str(self._noted),
            )
            (folder / command).write_text(text)
            (folder / command).chmod(0o755)

    def uninstall(self) -> None:
        for path in (self._tools / "bin").iterdir():
            path.unlink()

    async def start(self) -> Sandbox:
        settings = Settings(
            data_dir=self.root, tools_dir=self._tools, cache_dir=self.root / "cache", expose=(self._tools,)
        )
        runtime_id = new_id("runtime")  # identifies a sandbox's processes on the whole machine
        start = RuntimeStart(
            runtime_id=runtime_id,
            owner=self._owner,
            spec=RuntimeSpec(backend="process", network="full"),
            folder=self.root / runtime_id,
        )
        sandbox = await ProcessRuntime(settings).start(start)
        self._sandboxes.append(sandbox)
        return sandbox

    def context(self, sandbox: Sandbox, instruction: str = "do it", **changes: Any) -> HarnessContext:
        fields: dict[str, Any] = {
            "session_id": "s1",
            "task_id": "t1",
            "instruction": instruction,
            "model": _MODEL,
            "base_url": _BASE_URL,
            "api_key": _KEY,
            "runtime": sandbox,
            "env": {},
        }
        return HarnessContext(**fields | changes)

    async def prepared(self, **changes: Any) -> tuple[Sandbox, Launch]:
        sandbox = await self.start()
        launch = await self.make().prepare(self.context(sandbox, **changes))
        assert isinstance(launch, Launch), "an agent that lives in the node is checked by tests of its own"
        return sandbox, launch

    async def launched(self, **changes: Any) -> tuple[Sandbox, Given]:
        """Prepare and run. Returns the sandbox and the stand-in's input."""
        sandbox, launch = await self.prepared(**changes)
        self._noted.unlink(missing_ok=True)
        result = await sandbox.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout_s=_PATIENCE_S)
        assert self._noted.exists(), f"its program was not started: {result.stderr[-300:]!r}"
        return sandbox, msgspec.json.decode(self._noted.read_bytes(), type=Given)

    async def stop_all(self) -> None:
        for sandbox in self._sandboxes:
            await sandbox.stop()


Check = Callable[[Bench], Awaitable[None]]
_CHECKS: list[Check] = []


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def checks() -> list[Check]:
    return list(_CHECKS)


async def run_check(check: Check, subject: Subject, root: Path) -> None:
    """Run one check against an adapter; `root` is an empty folder."""
    bench = Bench(subject, root)
    try:
        await asyncio.wait_for(check(bench), _PATIENCE_S)
    finally:
        await bench.stop_all()


def _files(folder: str) -> Iterator[Path]:
    for path in Path(folder).rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def _all_text(sandbox: Sandbox, given: Given) -> str:
    """All text that the program can read."""
    files = [path.read_bytes().decode(errors="replace") for path in _files(sandbox.home)]
    return "\n".join([*given.argv, given.stdin, *given.env.values(), *files])


# -- what it declares --------------------------------------------------------------------------------------------


@_check
async def declares_itself_by_its_own_name(bench: Bench) -> None:
    harness = bench.subject.harness
    assert harness.name
    if bench.program is not None:
        assert bench.program.harness == harness.name, "`gangline harness install` would name another harness"


@_check
async def declares_logs_inside_home(bench: Bench) -> None:
    if isinstance(bench.subject.harness, Logged):
        for pattern in bench.subject.harness.logs:
            assert not pattern.startswith("/"), f"{pattern}: is to be relative to HOME"
            assert ".." not in pattern.split("/"), f"{pattern}: leaves HOME"
            assert not set(pattern) & set(" '\"$`;&|<>()\n\\~"), f"{pattern}: more than a pattern of names"


@_check
async def refuses_settings_that_it_does_not_know(bench: Bench) -> None:
    try:
        bench.make(no_such_setting=1)
    except ValidationError:
        return
    raise AssertionError("an unknown setting was taken: a misspelt one would do nothing, and nobody would know")


# -- prepare -----------------------------------------------------------------------------------------------------


@_check
async def writes_into_home_alone(bench: Bench) -> None:
    sandbox, _ = await bench.prepared()
    assert list(_files(sandbox.workdir)) == [], "the working folder is the task's"
    folder = bench.root / sandbox.runtime_id
    others = [path for path in _files(str(folder)) if Path(sandbox.home) not in path.parents and path.parent != folder]
    assert others == [], f"written outside of HOME: {others}"


@_check
async def tells_the_key_to_nobody_else(bench: Bench) -> None:
    sandbox, launch = await bench.prepared()
    words = [launch.command] if isinstance(launch.command, str) else list(launch.command)
    assert not any(_KEY in word for word in words), "the key is in the command line, which every process can read"
    for path in _files(sandbox.home):
        if _KEY.encode() in path.read_bytes():
            mode = stat.S_IMODE(path.stat().st_mode)
            assert not mode & 0o077, f"{path.relative_to(sandbox.home)} holds the key, and others may read it: {mode:o}"


@_check
async def tells_its_program_model_address_and_key(bench: Bench) -> None:
    text = _all_text(*await bench.launched())
    for what, value in (("the model", _MODEL), ("where model calls go", _BASE_URL), ("the key", _KEY)):
        assert value in text, f"its program is not told {what}"


@_check
async def passes_the_tasks_environment_on(bench: Bench) -> None:
    _, given = await bench.launched(env={"SLED_DOGS": "8"})
    assert given.env.get("SLED_DOGS") == "8", "`agent.env` does not reach the program"


@_check
async def gives_instructions_as_they_are(bench: Bench) -> None:
    for what, instruction in INSTRUCTIONS.items():
        sandbox, given = await bench.launched(instruction=instruction)
        assert _has_instruction(sandbox, given, instruction), f"an instruction with {what} does not arrive whole"
        assert not (Path(sandbox.workdir) / "pwned").exists(), "an instruction was run as shell text"


def _has_instruction(sandbox: Sandbox, given: Given, instruction: str) -> bool:
    if instruction in (given.stdin, given.stdin.removesuffix("\n")):
        return True
    if any(word == instruction or word.endswith(f"={instruction}") for word in given.argv):
        return True
    if instruction in given.env.values():
        return True
    texts = [given.stdin, *(path.read_bytes().decode(errors="replace") for path in _files(sandbox.home))]
    forms = (instruction, json.dumps(instruction), json.dumps(instruction, ensure_ascii=False))
    return any(form in text for form in forms for text in texts)


@_check
async def gives_long_instructions_whole_or_refuses_them(bench: Bench) -> None:
    try:
        sandbox, given = await bench.launched(instruction=_LONG)
    except HarnessError:
        return
    assert _has_instruction(sandbox, given, _LONG), f"an instruction of {len(_LONG)} characters does not arrive whole"


@_check
async def starts_each_session_alike(bench: Bench) -> None:
    (first, one), (second, other) = await bench.prepared(), await bench.prepared()
    assert _words(one, first) == _words(other, second), "the second session's command is another one"


def _words(launch: Launch, sandbox: Sandbox) -> list[str]:
    words = [launch.command] if isinstance(launch.command, str) else list(launch.command)
    return [word.replace(sandbox.home, "HOME").replace(sandbox.workdir, "WORKDIR") for word in words]


@_check
async def gives_its_program_servers_and_skills_that_it_takes(bench: Bench) -> None:
    harness = bench.subject.harness
    takes = harness.takes if isinstance(harness, SupportsCapabilities) else frozenset[str]()
    if "mcp_servers" in takes:
        servers = {
            "sled": McpServer(command=(_MCP_COMMAND, "--fast"), env={"DOGS": "eight-dogs"}),
            "far": McpServer(url="http://127.0.0.1:9/mcp"),
        }
        text = _all_text(*await bench.launched(mcp_servers=servers))
        for piece in (_MCP_COMMAND, "--fast", "eight-dogs", "http://127.0.0.1:9/mcp"):
            assert piece in text, f"{piece!r} of an MCP server is not told"
    if "skills" in takes:
        skills = {"steering": {"SKILL.md": _SKILL, "scripts/turn.sh": "echo gee"}}
        sandbox, _ = await bench.launched(skills=skills)
        written = {path.relative_to(sandbox.home).as_posix(): path.read_text() for path in _files(sandbox.home)}
        for ending, content in (("steering/SKILL.md", _SKILL), ("steering/scripts/turn.sh", "echo gee")):
            assert content in [text for name, text in written.items() if name.endswith(ending)], f"no {ending} in HOME"


# -- the program -------------------------------------------------------------------------------------------------


async def _refusal(bench: Bench, **settings: Any) -> str:
    sandbox = await bench.start()
    try:
        await bench.make(**settings).prepare(bench.context(sandbox))
    except HarnessError as error:
        return error.message
    raise AssertionError("prepare did not refuse")


@_check
async def names_a_missing_program_and_how_to_install_it(bench: Bench) -> None:
    if bench.program is None or any((Path(folder) / bench.program.command).exists() for folder in _system_folders()):
        return
    bench.uninstall()
    message = await _refusal(bench)
    assert bench.program.command in message, message
    assert f"gangline harness install {bench.program.harness}" in message, message


def _system_folders() -> Sequence[str]:
    return _SYSTEM_PATH.split(os.pathsep)


@_check
async def refuses_another_version_and_tells_both(bench: Bench) -> None:
    if bench.program is None:
        return
    bench.install("0.0.1")
    message = await _refusal(bench)
    for piece in ("0.0.1", bench.program.version, f"gangline harness install {bench.program.harness}"):
        assert piece in message, message


@_check
async def takes_another_version_when_it_is_told_to(bench: Bench) -> None:
    if bench.program is None:
        return
    bench.install("0.0.1")
    for version in ("0.0.1", None):
        sandbox = await bench.start()
        await bench.make(version=version).prepare(bench.context(sandbox))


@_check
async def tells_why_a_program_does_not_start(bench: Bench) -> None:
    if bench.program is None:
        return
    bench.install(starts=False)
    message = await _refusal(bench)
    assert "does not start" in message, message


# -- judge -------------------------------------------------------------------------------------------------------


@_check
async def knows_a_run_that_worked(bench: Bench) -> None:
    verdict = bench.make().judge(bench.subject.worked)
    assert verdict.ok, f"a run that worked is judged failed: {verdict.reason}"


@_check
async def knows_runs_that_failed(bench: Bench) -> None:
    assert bench.subject.failed, "no failed run was recorded"
    for what, result in bench.subject.failed.items():
        verdict = bench.make().judge(result)
        assert not verdict.ok, f"{what}: judged as if it had worked"
        assert verdict.reason.strip(), f"{what}: no reason is given"


@_check
async def does_not_take_a_broken_off_run_for_a_whole_one(bench: Bench) -> None:
    worked = bench.subject.worked
    for what, result in {
        "out of time": msgspec.structs.replace(worked, exit_code=None, timed_out=True),
        "killed": msgspec.structs.replace(worked, exit_code=None, signal=9, stdout=b""),
        "not started": ExecResult(exit_code=127, stderr=b"sh: not found\n"),
    }.items():
        verdict = bench.make().judge(result)
        assert not verdict.ok, f"{what}: judged as if it had worked"
        assert verdict.reason.strip(), f"{what}: no reason is given"


@_check
async def judges_whatever_words_it_is_given(bench: Bench) -> None:
    """The agent can write to its program's streams; a judge that raises would make that our fault."""
    harness = bench.make()
    for result in (bench.subject.worked, *bench.subject.failed.values()):
        for stdout in _mutilated(result.stdout):
            harness.judge(msgspec.structs.replace(result, stdout=stdout))
            harness.judge(msgspec.structs.replace(result, stdout=stdout, exit_code=1, signal=None, timed_out=False))


def _mutilated(stdout: bytes) -> Iterator[bytes]:
    yield from (b"", b"\0\xff\xfe", b"{", b"null\n1\n[{}]", b'{"type": 1}\n{"type": null}', b"[" * 100_000)
    yield stdout[: len(stdout) // 2]
    lines = stdout.splitlines()
    for number, line in enumerate(lines):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        for other in _with_one_value_changed(document):
            yield b"\n".join([*lines[:number], json.dumps(other).encode(), *lines[number + 1 :]])


def _with_one_value_changed(document: Any) -> Iterator[Any]:
    if isinstance(document, dict):
        fields = cast("dict[str, Any]", document)
        for name, value in fields.items():
            for other in _OTHER_VALUES:
                yield {**fields, name: other}
            yield {kept: fields[kept] for kept in fields if kept != name}
            for inner in _with_one_value_changed(value):
                yield {**fields, name: inner}
    elif isinstance(document, list):
        items = cast("list[Any]", document)
        for number, value in enumerate(items):
            for inner in _with_one_value_changed(value):
                yield [*items[:number], inner, *items[number + 1 :]]
