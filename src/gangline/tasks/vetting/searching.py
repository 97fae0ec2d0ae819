"""Searches a fresh sandbox for the solution, for hidden tests, and for files named in the instruction."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from gangline.tasks.vetting.grading import hidden_files, leaves
from gangline.tasks.vetting.subject import Subject
from gangline.tasks.vetting.trials import REPORT, Trial, program, scripted

SEARCH = "search"
_SHORTEST_LINE = 16
_LINES_AT_MOST = 400
_EXACT = range(4, 4096)
_FEW_LINES, _LONG_LINE = 2, 24
_SCRIPT = """
command -v python3 >/dev/null || exit 0
request=$(mktemp) && base64 -d > "$request"
exec 3<"$request"; rm -f "$request"
exec python3 -I -c "$(cat <<'GANGLINE_VET_END'
PROGRAM
GANGLINE_VET_END
)" <&3
"""
_FILE = re.compile(r"`([^`\s]+)`|(?<![\w/:.~-])((?:\.{0,2}/)?(?:[\w.-]+/)+[\w-]+\.\w{1,8})(?![\w/])")
_SUFFIXES = re.compile(
    r"(py|txt|json|jsonl|csv|tsv|sh|md|log|ya?ml|toml|ini|cfg|conf|[ch]|cc|[ch]pp|js|ts|go|rs|java|rb|sql|xml|html|css"
    r"|db|bin|dat|gz|tar|zip|png|pdf|ipynb|lock)",
    re.IGNORECASE,
)


class Searched(msgspec.Struct, frozen=True):
    """The result of a search."""

    found: dict[str, str] = {}
    """Secret -> the place where it was found."""
    there: list[str] = []
    """Existing files that the instruction names."""


def search(subject: Subject, results: Mapping[str, str]) -> Trial:
    """results: files that the reference solution wrote -> their text, if short."""
    groups = {name: (lines, 0.6) for name, lines in _of_solution(subject).items()}
    groups |= {name: (lines, 1.0) for name, lines in _of_tests(subject).items()}
    exact: dict[str, str] = {}
    solution = subject.solution
    if solution is not None and solution.kind == "answer":
        exact["the answer"] = _unboxed(solution.texts["answer"])
    request = {
        "groups": groups,
        "exact": _unshown(exact, subject),
        "results": _unshown({f"the content of {path}": text.strip() for path, text in results.items()}, subject),
        "folders": _folders(subject),
        "paths": named_files(subject),
    }
    stdin = base64.b64encode(msgspec.json.encode(request)).decode()
    return scripted(subject, SEARCH, _SCRIPT.replace("PROGRAM", program("search")), stdin=stdin)


def read_search(stderr: str) -> Searched | None:
    """None if the sandbox has no Python for the search."""
    mark = f"{REPORT} search "
    lines = [line.removeprefix(mark) for line in stderr.splitlines() if line.startswith(mark)]
    return msgspec.json.decode(lines[-1], type=Searched) if lines else None


def named_files(subject: Subject) -> list[str]:
    """Files named by the instruction but not by its evaluator. Skipped for repositories, whose issues name the
    reporter's files.
    """
    if any(leaf.get("strategy") == "swe_bench" for leaf in leaves(subject.evaluator)):
        return []
    graders = msgspec.json.encode(subject.evaluator).decode()
    named = [quoted or bare for quoted, bare in _FILE.findall(subject.instruction)]
    return [
        path
        for path in dict.fromkeys(one.rstrip(".,:;") for one in named)
        if re.fullmatch(r"[\w./-]+\.\w+", path)
        and _SUFFIXES.fullmatch(path.rpartition(".")[2])
        and path.rpartition("/")[2] not in graders
    ]


def _unshown(texts: Mapping[str, str], subject: Subject) -> dict[str, str]:
    return {name: text for name, text in texts.items() if len(text) in _EXACT and text not in subject.shown}


def _folders(subject: Subject) -> list[str]:
    folders = [".", *cast("tuple[str, ...]", subject.runtime.get("folders") or ()), "/solution", "/tests", "/oracle"]
    return [*folders, "/root", "/home", "/srv"] if subject.runtime.get("image") else folders


def _of_solution(subject: Subject) -> dict[str, list[str]]:
    if subject.solution is None:
        return {}
    texts = subject.solution.texts
    found = {f"the solution ({name})": _lines(text, subject.shown) for name, text in texts.items()}
    return {name: lines for name, lines in found.items() if _is_telling(lines)}


def _of_tests(subject: Subject) -> dict[str, list[str]]:
    """Lines of hidden tests. Data files may be in both places; a hidden test may not."""
    found = {
        f"the hidden file {path}": _lines(text, subject.shown)
        for path, text in hidden_files(subject.evaluator).items()
        if path.endswith((".py", ".sh", ".js", ".ts"))
    }
    return {name: lines for name, lines in found.items() if _is_telling(lines)}


def _is_telling(lines: list[str]) -> bool:
    return len(lines) >= _FEW_LINES or any(len(line) >= _LONG_LINE for line in lines)


def _lines(text: str, shown: str) -> list[str]:
    stripped = dict.fromkeys(line.strip() for line in text.splitlines())
    return [line for line in stripped if len(line) >= _SHORTEST_LINE and line not in shown][:_LINES_AT_MOST]


def _unboxed(answer: str) -> str:
    boxed: Any = re.search(r"\\boxed\{(.*)\}", answer)
    return str(boxed[1]) if boxed else answer.strip()
