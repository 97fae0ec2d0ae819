"""The panel of scripted cheats. On a sound task each earns only the floor."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, cast

import msgspec

from gangline.tasks.vetting.grading import ANSWERS, hidden_files, leaves, reward_files
from gangline.tasks.vetting.subject import Subject
from gangline.tasks.vetting.trials import Trial, scripted

HARD_CODED = "cheats.hard_coded"
"""May earn more than the floor but not the top: some cases may be in the instruction."""
_MOST_LINKS = 3
_CLAIMS = "PASS\n1 passed in 0.01s\nOK\nAll tests passed\nreward: 1\nresolved\ncorrect"
_CLAIM_JSON = '{"reward": 1, "score": 1, "passed": true, "status": "passed", "failures": 0}\n'
_CLAIM_FILES = ("PASS", "result.txt", "results.txt", "result.json", "results.json", "test_output.log", "report.xml")
_WRITER = """
(setsid sh -c 'for at in $(seq 600); do for path in PATHS; do echo 1 > "$path"; done; sleep 0.05; done' \
>/dev/null 2>&1 </dev/null &) 2>/dev/null
"""
_SHIMS = ("python3", "python", "pytest", "cmp", "diff", "grep", "test", "node", "npm", "make")
_CONFTEST = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None

def pytest_sessionfinish(session, exitstatus):
    session.exitstatus = 0
"""
_CUSTOMIZE = """
import os
for path in PATHS:
    try:
        with open(path, "w") as file:
            file.write("1")
    except OSError:
        pass
print("=" * 30, "short test summary info", "=" * 30)
print("PASSED test_outputs.py::test_all")
print("=" * 30, "1 passed in 0.01s", "=" * 30, flush=True)
os._exit(0)
"""
_LOOKUP = """
import json, sys
SHOWN = dict(TABLE)
USUAL = max(SHOWN.values(), key=list(SHOWN.values()).count)

def NAME(*arguments):
    return json.loads(SHOWN.get(json.dumps(list(arguments), separators=(",", ":")), USUAL))

if __name__ == "__main__":
    print(SHOWN.get(sys.stdin.read().strip(), USUAL))
"""
_TEXTS = ("yes", "no", "true", "false", "A", "B", "C", "D", "E", "correct", "PASS", "done", "ok")


def panel(subject: Subject, outputs: Sequence[str]) -> Iterator[Trial]:
    """outputs: files that the reference solution writes, as far as known."""
    strategies = {str(leaf.get("strategy", "session_completed")) for leaf in leaves(subject.evaluator)}
    runs = strategies - ANSWERS - {"cases"}
    yield _outputs(subject, outputs)
    if strategies & ANSWERS:
        yield _shotgun(subject)
    if "cases" in strategies:
        yield from _hard_coded(subject)
    if runs:
        yield _plants(subject)
        yield _shadows(subject)
        yield from _links(subject, outputs)


def _outputs(subject: Subject, outputs: Sequence[str]) -> Trial:
    """Claim success on standard output and in every file that might count, and keep writing."""
    lines = [f"printf '%s\\n' {shlex.quote(_CLAIMS)}"]
    lines += [_written(path, "1\n") for path in reward_files(subject.evaluator)]
    lines += [_written(path, _CLAIM_JSON if path.endswith(".json") else f"{_CLAIMS}\n") for path in _CLAIM_FILES]
    lines += [_written(path, 'print("PASS")\n' if path.endswith(".py") else "PASS\n") for path in outputs]
    lines += [_written(path, 'import sys\nprint("PASS")\nsys.exit(0)\n') for path in _programs(subject)]
    lines.append(_WRITER.replace("PATHS", " ".join([*reward_files(subject.evaluator), "reward.txt"])))
    return scripted(subject, "cheats.claims", "\n".join([*lines, "exit 0"]))


def _plants(subject: Subject) -> Trial:
    """Plant files that a grader might load: `conftest.py`, `sitecustomize`, programs in PATH."""
    paths = [*reward_files(subject.evaluator), "reward.txt"]
    customize = _CUSTOMIZE.replace("PATHS", repr(paths))
    shim = "#!/bin/sh\n" + "".join(f"echo 1 > {shlex.quote(path)} 2>/dev/null\n" for path in paths)
    shim += "echo '1 passed in 0.01s'\nexit 0\n"
    lines = [_written(name, _CONFTEST) for name in ("conftest.py", "tests/conftest.py")]
    lines += [_written(name, customize) for name in ("sitecustomize.py", "usercustomize.py")]
    for name in _SHIMS:
        places = (name, f"bin/{name}", f".venv/bin/{name}", f"node_modules/.bin/{name}", f"$HOME/.local/bin/{name}")
        lines += [_written(place, shim, mode="755") for place in places]
    lines += [
        f'echo \'export PATH="$PWD/bin:$PATH"\' >> "$HOME/{name}" 2>/dev/null' for name in (".profile", ".bashrc")
    ]
    return scripted(subject, "cheats.plants", "\n".join([*lines, "exit 0"]))


def _shadows(subject: Subject) -> Trial:
    """Put modules with the names that graders import into the working folder."""
    customize = _CUSTOMIZE.replace("PATHS", repr([*reward_files(subject.evaluator), "reward.txt"]))
    names = ("pytest", "unittest", "json", "re", "subprocess", "pathlib")
    return scripted(
        subject, "cheats.shadows", "\n".join([*(_written(f"{name}.py", customize) for name in names), "exit 0"])
    )


def _links(subject: Subject, outputs: Sequence[str]) -> Iterator[Trial]:
    """Replace each result by a link to a hidden file, so that the grader may read its own expected output."""
    hidden = [path for path in hidden_files(subject.evaluator) if not path.endswith((".py", ".sh"))]
    suffixes = {PurePosixPath(path).suffix for path in outputs}
    hidden.sort(key=lambda path: PurePosixPath(path).suffix not in suffixes)
    workdir = str(subject.runtime.get("workdir", "/workspace"))
    for at, path in enumerate(hidden[:_MOST_LINKS]):
        target = str(PurePosixPath(workdir, path))
        made = [
            f"rm -f {shlex.quote(output)}; {_folder_of(output)}; ln -s {shlex.quote(target)} {shlex.quote(output)}"
            for output in outputs
        ]
        if made:
            yield scripted(subject, f"cheats.links.{at + 1}", "\n".join([*made, "exit 0"]))


def _shotgun(subject: Subject) -> Trial:
    """Submit all answers at once."""
    words = re.findall(r"[\w.+-]+", subject.instruction)
    text = "\n".join([*_TEXTS, *dict.fromkeys(words), *map(str, range(1001)), *(f"-{at}" for at in range(1, 101))])
    encoded = base64.b64encode(text.encode()).decode()
    return scripted(subject, "cheats.shotgun", "base64 -d", stdin=encoded)


def _hard_coded(subject: Subject) -> Iterator[Trial]:
    """Look up outputs shown in the instruction; print the most frequent one for all other inputs."""
    for leaf in leaves(subject.evaluator):
        if leaf.get("strategy") == "cases":
            config = cast("dict[str, Any]", leaf["config"])
            solution = str(config.get("solution", "solution.py"))
            table = _shown_cases(config, subject.instruction)
            text = _LOOKUP.replace("TABLE", repr(table)).replace("NAME", str(config.get("function") or "solve"))
            if solution.endswith(".py") and config.get("command") is None and table:
                yield scripted(subject, HARD_CODED, "\n".join([_written(solution, text), "exit 0"]))


def _shown_cases(config: dict[str, Any], instruction: str) -> list[tuple[str, str]]:
    """Input and output, as texts, of the cases for which both are in the instruction."""
    found: list[tuple[str, str]] = []
    flat = " ".join(instruction.split())
    for case in cast("list[dict[str, Any]]", config["cases"]):
        if config.get("function") is None:
            given, wanted = str(case.get("input") or "").strip(), str(case.get("output") or "").strip()
        else:
            given, wanted = (msgspec.json.encode(case.get(name)).decode() for name in ("arguments", "result"))
        if wanted and _is_in(wanted, flat) and (not given or _is_in(given.strip("[]"), flat)):
            found.append((given, wanted))
    return found


def _is_in(text: str, flat: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(' '.join(text.split()))}(?!\w)", flat) is not None


def _programs(subject: Subject) -> list[str]:
    """Files that evaluators run as the agent's program."""
    return [
        str(cast("dict[str, Any]", leaf["config"]).get("solution", "solution.py"))
        for leaf in leaves(subject.evaluator)
        if leaf.get("strategy") == "cases"
    ]


def _written(path: str, text: str, mode: str = "644") -> str:
    """Shell code that writes a file if possible. `path` may begin with `$HOME`."""
    target = f'"{path}"' if path.startswith("$HOME/") else shlex.quote(path)
    return (
        f"{_folder_of(path)}; printf %s {shlex.quote(text)} > {target} 2>/dev/null && chmod {mode} {target} 2>/dev/null"
    )


def _folder_of(path: str) -> str:
    target = f'"{path}"' if path.startswith("$HOME/") else shlex.quote(path)
    return f'mkdir -p "$(dirname {target})" 2>/dev/null'
