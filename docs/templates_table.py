"""The page of chat templates: what the laboratory found of each. `make templates` measures it anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "templates.json"
_CHECKS = Path(__file__).parent / "template_checks.json"
_TITLES = ("template", "ids", "rendered", "tools read", "changes", "refused, and other reasons")
_ROWS_SHOWN = 3
_INTRODUCTION = """\
# Chat templates, with the requests of real clients

Every chat template that comes with TRL 1.16 (`trl/`) and with llama.cpp (`llama.cpp/`, of the sdist of llama-cpp-python
0.3.36), with the first requests of every agent program and SDK that `tests/templates/recordings` holds, recorded from
their real runs. `make test-templates` puts each recording through each template, through the dialect, the session, the
stitching and an engine that answers with the turns that the template itself writes. A rendering by Jinja alone judges
every prompt.

*ids*: the node sends exact ids, and stitches. *rendered*: the engine renders every prompt. Of the recordings are

- *equal*: every prompt is the template's rendering of the client's messages;
- *kept*: the same, apart from the model's own turns, which stay as they were sampled, such as with their thinking;
- *fitted*: of messages that were changed to a form that the template takes; the record names the change;
- *said*: a prompt differs, and its certificate says so;
- *refused*: the template cannot serve these messages, which is known before the first session.

Two more would be faults, and are counted: `silent`, another prompt without a word, and `refused_late`, a session that
is refused although no fact of the template said so. *tools read* is the format in which calls are read out of the text
where the engine does not read them itself; *none* is said by [`gangline doctor`](cli/doctor.md).

"""


def templates_table() -> str:
    """docs/reference/templates.md"""
    found: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    total: dict[str, int] = {}
    for row in found.values():
        for counts in row["outcomes"].values():
            for outcome, number in counts.items():
                total[outcome] = total.get(outcome, 0) + number
    faults = {name: total.pop(name, 0) for name in ("silent", "refused_late")}
    figures = ", ".join(f"{number} {name}" for name, number in (sorted(total.items()) + list(faults.items())))
    lines = [
        f"{len(found)} templates, {sum(total.values()) + sum(faults.values())} cells: {figures}.\n",
        f"| {' | '.join(_TITLES)} |",
        "|---" * len(_TITLES) + "|",
        *_rows(found),
    ]
    return _INTRODUCTION + "\n".join(lines) + "\n\n" + _unserved(found) + _checks()


def _rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, row in found.items():
        cells = (
            f"`{name}`",
            *(_counts(row["outcomes"][route]) for route in ("ids", "rendered")),
            row["tools"] or "none",
            _listed(row.get("changed", {})),
            _listed(row.get("refused", {}) or row.get("row", {})),
        )
        yield f"| {' | '.join(cells)} |"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _listed(reasons: dict[str, int]) -> str:
    most = sorted(reasons, key=lambda reason: -reasons[reason])[:_ROWS_SHOWN]
    return "; ".join(reason.replace("|", "\\|").replace("\n", " ")[:120] for reason in most)


def _unserved(found: dict[str, dict[str, Any]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, row in found.items():
        for reason in row.get("refused", {}):
            by_reason.setdefault(reason, []).append(f"`{name}`")
    lines = [
        f"| {reason.replace('|', chr(92) + '|')[:150]} | {', '.join(names)} |"
        for reason, names in sorted(by_reason.items())
    ]
    return "## Not served\n\n| reason | templates |\n|---|---|\n" + "\n".join(lines) + "\n"


def _checks() -> str:
    """Agent programs over a template of each family."""
    if not _CHECKS.exists():
        return ""
    found: dict[str, dict[str, Any]] = json.loads(_CHECKS.read_text(encoding="utf-8"))
    names = [one["harness"] for one in next(iter(found.values()))["harnesses"]]
    lines = [
        "\n## Agent programs over a template of each family\n",
        "`gangline harness check` of each program, with Qwen3's tokenizer and the template: four calls, of which three",
        "use tools. The scripted model writes each turn as the family's template does. A cell has the rows of the",
        "conversation; of its later calls those whose context is exact; of the stitched ones those that are the",
        "template's own rendering; and reasons where there are any. Gemma 4's template moves a text behind the call",
        "that it came with, and Mistral-Nemo's drops the system message once a tool was called: there a call begins a",
        "new row. Measured on 2026-11-29; `make check-templates` measures anew.\n",
        f"| family | template | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for family, one in found.items():
        cells = [f"{family}", f"`{one['template']}`", *map(_checked, one["harnesses"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _checked(report: dict[str, Any]) -> str:
    contexts: dict[str, int] = report["contexts"]
    exact, diverged = (contexts.get(one, 0) for one in ("exact", "diverged"))
    rows = sum(chain != "side" for chain in report["chains"])
    stitched = sum(report["renderings"].values())
    rendered = report["renderings"].get("as_rendered", 0)
    reasons = "; ".join(one.replace("|", "\\|") for one in (*report["causes"], *report["fallbacks"]))
    said = f"{rows} row{'s' * (rows != 1)}, {exact} of {exact + diverged} exact"
    said += f", {rendered} of {stitched} as rendered" * bool(stitched) + f" ({reasons})" * bool(reasons)
    return said if report["ok"] else f"**failed**, {said}"
