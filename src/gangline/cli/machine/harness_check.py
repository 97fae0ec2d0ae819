"""The implementation of `gangline harness check`: runs an agent program on a task against a scripted model, and
observes it.

The scripted engine requests three tool calls, one of which writes a file, with the tools that the program offers. So
the report shows the program's own behaviour: its API, its conversations, its extra calls, its edits.

The script has the model's steps through the task in every form that a program may require. Most programs offer tools,
and the scripted engine picks the matching one. Some describe other ways to act or to end in their prompts. Their rules
come first, and are selected by words in the prompts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gangline.cli.service.bring_up import Plan, run_service
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult
    from gangline.wire.client.running import Running
    from gangline.wire.client.server import ServerClient

CONTENT = "hello, sled"
_GRADER = f"""if [ "$(cat hello.txt)" = "{CONTENT}" ]; then echo 1; else echo 0; fi > reward.txt"""
_FILE = "/workspace/hello.txt"
"""Absolute, since some programs refuse to write to a relative path."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def _when(words: str, **rule: Any) -> dict[str, Any]:
    """A rule for programs whose prompt contains these words (a pattern)."""
    return {"pattern": words, "where": "any", **rule}


def _typed(turn: int, keys: str, *, is_done: bool = False) -> dict[str, Any]:
    """terminus-2 types keys. It asks to confirm the end."""
    commands = [{"keystrokes": keys, "duration": 0.3}] if keys else []
    answer = {"analysis": "as asked", "plan": "go on", "commands": commands, "task_complete": is_done}
    return _when('"keystrokes"', turn=turn, text=json.dumps(answer))


_BY_THEIR_WORDS: list[dict[str, Any]] = [
    _when(_SUBMIT, turn=3, tool_calls=[{"run": f"echo {_SUBMIT}"}]),  # how mini-swe-agent ends
    # OpenHands accepts no relative paths.
    _when("You are OpenHands", turn=1, tool_calls=[{"run": f"echo '{CONTENT}' > hello.txt"}]),
    _when("You are OpenHands", turn=2, tool_calls=[{"run": "cat hello.txt"}]),
    _typed(0, "ls\n"),
    _typed(1, f"echo '{CONTENT}' > hello.txt\n"),
    _typed(2, "cat hello.txt\n"),
    _typed(3, "", is_done=True),
    _typed(4, "", is_done=True),
    # aider: edits are written in the text.
    {
        "pattern": r"\*SEARCH/REPLACE block\* Rules",
        "text": f"hello.txt\n```\n<<<<<<< SEARCH\n=======\n{CONTENT}\n>>>>>>> REPLACE\n```\n",
    },
]

SCRIPT: dict[str, Any] = {
    "context_length": 1_000_000,
    "rules": [
        *_BY_THEIR_WORDS,
        {"turn": 0, "text": "I look around first.", "tool_calls": [{"run": "ls"}]},
        {"turn": 1, "tool_calls": [{"write": {"path": _FILE, "content": f"{CONTENT}\n"}}]},
        {"turn": 2, "tool_calls": [{"read": _FILE}]},
        {"turn": 3, "text": "hello.txt is written."},
    ],
    "default": {"text": "Greeting"},
}


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of one harness. Counts are of model calls unless a name says otherwise."""

    harness: str
    version: str | None
    """Version of the installed program, or None."""
    ok: bool
    outcome: str
    dialects: tuple[str, ...]
    num_turns: int
    chains: tuple[str, ...]
    """Roles of the rows, in order."""
    contexts: dict[str, int]
    """first, exact, diverged."""
    renderings: dict[str, int]
    """Stitched calls: `as_rendered`, `not_as_rendered`, `not_compared` with the template's rendering."""
    fallbacks: dict[str, int]
    """Reasons why calls were not stitched although the engine accepts ids."""
    causes: dict[str, int]
    """Reasons why contexts were not exact, and the program's changes to its history."""
    num_side_calls: int
    num_sampled_tokens: int
    wall_s: float
    """Seconds of the program's whole run."""
    model_s: float
    """Seconds of the run in which at least one model call was being answered."""
    problems: tuple[str, ...]
    template_told: tuple[str, ...] = ()
    """Short descriptions of the chat template's features."""
    template_lacks: tuple[str, ...] = ()
    """Features that the chat template lacks."""


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The programs to check, and how."""

    harnesses: tuple[tuple[str, dict[str, Any]], ...]
    """Name and settings of each harness."""
    data_dir: Path
    """For the service and sessions."""
    tokenizer: str
    """Tokenizer of the scripted engine."""
    tier: Literal["auto", "observe"]
    timeout_s: float
    """Seconds that each program may run."""


def check_harnesses(plan: CheckPlan) -> list[CheckReport]:
    """Check them one after the other, so that they do not compete for the machine. Raises: asyncio.CancelledError after
    a signal."""
    plan.data_dir.mkdir(parents=True, exist_ok=True)
    script = plan.data_dir / "script.json"
    script.write_text(json.dumps(SCRIPT))
    service = Plan(data_dir=plan.data_dir, port=0, engine=f"scripted:{script}", tokenizer=plan.tokenizer)

    async def body(live: Running) -> list[CheckReport]:
        from gangline.wire.client.server import ServerClient

        async with ServerClient(live.server_url, live.control_token) as client:
            return [await _check(client, name, settings, plan) for name, settings in plan.harnesses]

    return asyncio.run(run_service(service, body))


async def _check(client: ServerClient, harness: str, settings: dict[str, Any], plan: CheckPlan) -> CheckReport:
    task = {
        "task_id": f"check-{harness}-{time.time_ns():x}",
        "instruction": f"Write a file hello.txt with the line {CONTENT!r}, then look whether it is right.",
        "timeout_seconds": plan.timeout_s,
        "max_attempts": 1,
        "agent": {"harness": harness, "settings": _with_room(harness, settings), "max_turns": 50},
        "capture": {"tier": plan.tier},
        "evaluator": {"strategy": "script", "config": {"command": _GRADER}},
    }
    submitted = await client.submit(task)
    await client.wait(submitted.task_id, timeout_s=plan.timeout_s + 120)
    (result,) = await client.result(submitted.task_id)
    template = next(backend for node in (await client.status()).nodes for backend in node.backends)
    findings = {name: tuple(template[name]) for name in ("template_told", "template_lacks")}
    return msgspec.structs.replace(_report(harness, result), **findings)


def _with_room(harness: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the scripted engine's context window, unless they name another.

    The built-in tokenizer makes several times as many tokens of a prompt as a model's. A program with a small window
    would compress its history before doing anything.
    """
    from gangline.settings.plugins import load

    has_window = "context_window" in load("harness", harness).Config.model_fields
    return {**({"context_window": SCRIPT["context_length"]} if has_window else {}), **settings}


def _report(harness: str, result: SessionResult) -> CheckReport:
    from gangline.domain.completion import CompletionTree
    from gangline.rows.drift import call_drifts, drift_report
    from gangline.rows.lineage import assign_roles

    drift = drift_report(call_drifts(result.completions))
    roles = Counter(role.role for role in assign_roles(CompletionTree(result.completions)).values())
    traces = result.trajectory.traces if result.trajectory else ()
    problems = tuple(_problems(result))
    return CheckReport(
        harness=harness,
        version=_version(harness),
        ok=not problems,
        outcome=result.outcome,
        dialects=tuple(sorted({completion.dialect for completion in result.completions})),
        num_turns=len(result.completions),
        chains=tuple(trace.role for trace in traces),
        contexts=drift.contexts,
        renderings=drift.renderings,
        fallbacks=drift.fallbacks,
        causes=drift.causes,
        num_side_calls=roles["side"],
        num_sampled_tokens=drift.num_sampled_tokens,
        wall_s=sum(timing.ended_at - timing.started_at for timing in result.timings if timing.stage == "run"),
        model_s=_busy_s([(completion.started_at, completion.finished_at) for completion in result.completions]),
        problems=problems,
    )


def _problems(result: SessionResult) -> list[str]:
    from gangline.rows.audit import audit

    found: list[str] = []
    if result.failure is not None:
        found.append(f"{result.failure.boundary}: {result.failure.message}")
    elif result.outcome != "completed":
        found.append(f"the session ended as {result.outcome}")
    if result.reward != 1.0:
        found.append("the file that it was to write is missing or wrong")
    if not result.completions:
        found.append("it made no model call")
    if result.trajectory is not None:
        audited = audit(result.trajectory, result.completions)
        found += [] if audited.ok else ["the audit of its rows found faults"]
    if found and (output := result.artifacts.get("harness.stderr") or result.artifacts.get("harness.stdout")):
        found.append(f"its last words: {output[-600:].decode(errors='replace').strip()}")
    return found


def _version(harness: str) -> str | None:
    from gangline.agents.harnesses.installation import installed_version, program_of

    program = program_of(harness)
    return None if program is None else installed_version(program, Settings.from_environ().tools_dir)


def _busy_s(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans."""
    busy_s, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy_s
