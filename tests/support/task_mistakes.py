"""Mistakes of tasks that no machine could run: the field that a refusal names, and the task's fields."""

from __future__ import annotations

from typing import Any

__all__ = ["MISTAKES", "SHELL", "runtime", "script", "wrote"]

SHELL: dict[str, Any] = {"harness": "shell", "settings": {"command": "true"}}
LONG = "x" * (128 << 10)


def runtime(**fields: Any) -> dict[str, Any]:
    return {"runtime": fields}


def wrote(path: str) -> list[dict[str, Any]]:
    return [{"type": "write", "path": path, "content": ""}]


def evaluator(strategy: str, **config: Any) -> dict[str, Any]:
    return {"evaluator": {"strategy": strategy, "config": config}}


def script(**config: Any) -> dict[str, Any]:
    return evaluator("script", **{"command": "true", **config})


def graded_in(**fields: Any) -> dict[str, Any]:
    return {"evaluator": script()["evaluator"] | {"refresh_runtime": True, "runtime": fields}}


BAD_FOLDERS = (
    "/etc",
    "/usr/lib/x",
    "/proc/self",
    "/",
    "//",
    "/.",
    "workspace",
    "./w",
    "",
    "/a/../etc",
    "/a\0b",
    "/dev",
)
BAD_FILES = ("", ".", "..", "../x", "a/../b", "/workspace/../etc/passwd", "a\0b", "a/", "a/.")
BAD_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"": "x"},
    {"A=B": "x"},
    {"A\nB": "x"},
    {"A\0B": "x"},
    {"A B": "x"},
    {"\tA": "x"},
    {"A": "x\0y"},
    {"A": LONG},
    {"A" * (128 << 10): ""},
    {f"A{number}": "x" * 100_000 for number in range(20)},
    {"PATH": ""},
    {"PATH": "/opt/tools"},
    {"PATH": "/opt/tools:$PATH"},
    {"PATH": "/bin:${PATH}"},
)
BAD_COMMANDS: tuple[Any, ...] = ("", "a\0b", LONG, [], [""], ["a\0b"], ["true", LONG])
HUGE = (2**63, 10**30, int("9" * 400))
BAD_LIMITS: dict[str, tuple[Any, ...]] = {
    "memory_bytes": (0, -1, "many", 0.5, *HUGE),
    "disk_bytes": (0, -1, *HUGE),
    "max_file_bytes": (0, -1, *HUGE),
    "max_files": (0, -1, *HUGE),
    "max_pids": (0, -1, 1 << 23, *HUGE),
    "cpus": (0, -1, float("nan"), float("inf"), 1e300, *HUGE),
}
BAD_SECONDS = (0, -1, float("nan"), float("inf"), 1e12, 1e300, int("9" * 400), "soon")

TIMES = ("timeout_seconds", "init_timeout_seconds", "evaluation_timeout_seconds")
RUN = {"type": "exec", "command": "true"}

MISTAKES: list[tuple[str, dict[str, Any]]] = [
    *(("runtime.workdir", runtime(workdir=one)) for one in BAD_FOLDERS),
    *(("runtime.folders", runtime(folders=[one])) for one in BAD_FOLDERS),
    *(("evaluator.runtime.workdir", graded_in(workdir=one)) for one in BAD_FOLDERS),
    *(("runtime.prepare.0.", runtime(prepare=wrote(one))) for one in (*BAD_FILES, "/etc/passwd", "/workspaces")),
    *(("runtime.prepare.0.", runtime(prepare=[RUN | {"command": one}])) for one in ("a\0b", LONG)),
    *(("runtime.prepare.0.", runtime(prepare=[RUN | {"timeout_seconds": one}])) for one in BAD_SECONDS),
    *(("runtime.env", runtime(env=one)) for one in BAD_ENVIRONMENTS),
    *(("agent.env", {"agent": SHELL | {"env": one}}) for one in BAD_ENVIRONMENTS),
    *(("env", script(env=one)) for one in BAD_ENVIRONMENTS),
    *(("command", script(command=one)) for one in BAD_COMMANDS),
    *(("command", {"agent": {"harness": "shell", "settings": {"command": one}}}) for one in BAD_COMMANDS),
    *(("files", script(files={one: ""})) for one in BAD_FILES),
    *(("collect", script(collect=[one])) for one in BAD_FILES),
    *(("reward_file", script(reward_file=one)) for one in BAD_FILES),
    *(("clear", script(clear=[one])) for one in ("", "..", "a\0b", "../x")),
    *(("evaluator", script(timeout_seconds=one)) for one in BAD_SECONDS),
    *((f"runtime.limits.{name}", runtime(limits={name: one})) for name, values in BAD_LIMITS.items() for one in values),
    *((name, {name: one}) for name in TIMES for one in BAD_SECONDS),
    ("runtime.image", runtime(image="-it")),
    ("runtime.image", runtime(image="")),
    ("runtime.image", runtime(image="./images/debian")),
    ("runtime.image", runtime(image="/images/a\0b")),
    ("runtime.image", runtime(backend="process", image="/x")),
    ("runtime.image", runtime(backend="docker")),
    ("runtime.image", runtime(backend="docker", image="-it")),
    ("runtime.workdir", runtime(backend="docker", image="debian:12", workdir="/etc")),
    ("runtime.prepare.0.path", runtime(backend="docker", image="debian:12", prepare=wrote("/proc/x"))),
    ("runtime.python", runtime(backend="docker", image="debian:12", python="/venv")),
    ("runtime.folders", runtime(backend="process", folders=["/logs"])),
    ("runtime.prepare.0.path", runtime(backend="process", prepare=wrote("/tmp/x"))),
    ("collect", evaluator("cases", cases=[{"input": "", "output": ""}], collect=[".."])),
    ("path", evaluator("test_on_output", source="file", path="../x", checks=[{"kind": "equals", "value": ""}])),
    ("capture.volatile_system_text", {"capture": {"volatile_system_text": ["(a+)+$"]}}),
    ("solution.env", {"solution": {"command": "true", "env": {"A=": ""}}}),
    ("steps.0", {"steps": [{"name": "a", "instruction": "Do it.", "prepare": wrote("/etc/x")}]}),
]
