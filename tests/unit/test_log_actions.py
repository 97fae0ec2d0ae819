"""The page of log lines is what the source logs: each action is listed, each listed one exists, each value is named."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from log_actions import SOURCE, event_kinds, log_calls

from gangline.machine.telemetry.actions import ACTIONS

PUT_TOGETHER = {"server/service/core.py"}
"""Where the whole action is a variable: kinds of events."""


def test_every_line_that_the_source_logs_has_a_listed_action() -> None:
    unlisted = [f"{call.where}: {call.action!r}" for call in log_calls() if not any(map(call.means, ACTIONS))]
    assert unlisted == [], "add them to gangline/telemetry/actions.py, then run `make docs`"


def test_every_kind_of_event_is_listed() -> None:
    assert event_kinds() - ACTIONS.keys() == set()


def test_every_listed_action_is_logged_somewhere() -> None:
    calls = [call for call in log_calls() if call.action != "%s"]
    constants = event_kinds()
    assert [a for a in ACTIONS if a not in constants and not any(call.means(a) for call in calls)] == []


def test_every_value_in_a_line_has_a_name() -> None:
    assert [call.where for call in log_calls() if call.unnamed and call.where.split(":")[0] not in PUT_TOGETHER] == []


def test_the_scan_sees_what_there_is() -> None:
    seen = {call.where.split(":")[0] for call in log_calls()}
    # The three set up handlers or hand a logger on, and log nothing.
    having = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "logging.getLogger(" in path.read_text()
    } - {"cli/terminal/output.py", "train/commands/run.py", "interop/harbor/runtime/in_sandbox/bridge.py"}
    assert having - seen == set()
