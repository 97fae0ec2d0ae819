"""The page of chat templates: what the laboratory found of each. `make templates` measures it anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "templates.json"
_CHECKS = Path(__file__).parent / "template_checks.json"
_TITLES = ("templates", "ids", "rendered", "tools read", "changes", "other reasons")
_ROWS_SHOWN = 3
_INTRODUCTION = """\
# Chat templates, with the requests of real clients

Every chat template of TRL 1.16 (`trl/`) and llama.cpp (the others; llama-cpp-python 0.3.36), with the first requests of
every agent program and SDK in `tests/templates/recordings`, recorded from real runs. `make test-templates` puts each
recording through dialect, session, stitching and an engine that answers with the template's own turns. A rendering by
Jinja alone judges every prompt.

*ids*: the node sends exact ids, and stitches. *rendered*: the engine renders every prompt. Outcomes of recordings:

- *equal*: every prompt is the template's rendering of the client's messages;
- *kept*: the same, but the model's own turns stay as they were sampled, such as with their thinking;
- *fitted*: of messages that were changed to a form that the template takes; the record names the change;
- *said*: a prompt differs, and its certificate says so;
- *refused*: the template cannot serve these messages, which is known before the first session;
- *silent* and *refused_late* would be faults: a prompt that differs without a word, and a refusal that no known fact
  of the template explains.

*tools read* is the format in which tool calls are read from text where the engine does not read them;
[`gangline doctor`](cli/doctor.md) says so where there is none. Of the reasons, *strips thinking* is what the template
does at a new user turn (`thinking = follow_template`), and *ends turns otherwise* that a sampled turn does not end as
the template closes one. Templates with the same results share a row.

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
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in found.items():
        ids, rendered = (_counts(row["outcomes"][route]) for route in ("ids", "rendered"))
        cells = (
            ids,
            "same" if rendered == ids else rendered,
            row["tools"] or "none",
            _listed(row.get("changed", {})),
            "" if row.get("refused") else _listed(row.get("row", {})),
        )
        names.setdefault(cells, []).append(_short(name))
    for cells, those in names.items():
        yield f"| {', '.join(those)} | {' | '.join(cells)} |"


def _short(name: str) -> str:
    return f"`{name.removeprefix('llama.cpp/')}`"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _listed(reasons: dict[str, int]) -> str:
    most = sorted(reasons, key=lambda reason: -reasons[reason])[:_ROWS_SHOWN]
    return "; ".join(_reason(reason) for reason in most)


_SHORTER = {
    "the model's chat template refuses these messages: ": "",
    "the template would write another prompt: it writes ": "writes otherwise: ",
    "what stands before the model's first turn otherwise": "the beginning",
    "the new messages otherwise, or what stands before them as well": "the new messages, or the beginning",
    "a new user turn: the template strips the thinking before it (`thinking = follow_template`)": "strips thinking",
    "the sampled turn does not end as the template closes one": "ends turns otherwise",
    "the template does not show where the assistant's turn ends": "end of turn not shown",
}
"""Of reasons, in the order in which they are replaced."""


def _reason(text: str) -> str:
    for usual, shorter in _SHORTER.items():
        text = text.replace(usual, shorter)
    return text.replace("|", "\\|").replace("\n", " ")[:120]


def _unserved(found: dict[str, dict[str, Any]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, row in found.items():
        for reason in row.get("refused", {}):
            by_reason.setdefault(_reason(reason), []).append(_short(name))
    lines = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(by_reason.items())]
    return "## Refused\n\n| what, and why | templates |\n|---|---|\n" + "\n".join(lines) + "\n"


def _checks() -> str:
    """Agent programs over a template of each family."""
    if not _CHECKS.exists():
        return ""
    found: dict[str, dict[str, Any]] = json.loads(_CHECKS.read_text(encoding="utf-8"))
    names = [one["harness"] for one in next(iter(found.values()))["harnesses"]]
    lines = [
        "\n## Agent programs over a template of each family\n",
        f"`gangline harness check` of {', '.join(names)}, with Qwen3's tokenizer and the template: four calls, three",
        "of them with tools, which the scripted model writes as the family's template does. A cell has the rows of the",
        "conversation, the later calls whose context is exact, the stitched ones that are the template's own",
        "rendering, and reasons. Gemma 4's template moves a text behind the call that it came with, and Mistral-Nemo's",
        "drops the system message once a tool was called: there a call begins a new row. Measured on 2026-11-29 by",
        "`make check-templates`.\n",
        "| family | template | programs: result |",
        "|---|---|---|",
    ]
    for family, one in found.items():
        by_result: dict[str, list[str]] = {}
        for report in one["harnesses"]:
            by_result.setdefault(_checked(report), []).append(report["harness"])
        shown = [
            f"{'all' if len(those) == len(names) else ', '.join(those)}: {said}" for said, those in by_result.items()
        ]
        lines.append(f"| {family} | {_short(one['template'])} | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _checked(report: dict[str, Any]) -> str:
    contexts: dict[str, int] = report["contexts"]
    exact, diverged = (contexts.get(one, 0) for one in ("exact", "diverged"))
    rows = sum(chain != "side" for chain in report["chains"])
    stitched = sum(report["renderings"].values())
    rendered = report["renderings"].get("as_rendered", 0)
    reasons = "; ".join(_reason(one) for one in (*report["causes"], *report["fallbacks"]))
    said = f"{rows} row{'s' * (rows != 1)}, {exact} of {exact + diverged} exact"
    said += f", {rendered} of {stitched} as rendered" * bool(stitched) + f" ({reasons})" * bool(reasons)
    return said if report["ok"] else f"**failed**, {said}"
