"""How a log line looks, and what cannot be done to it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from gangline.cli.terminal.output import read_log_format
from gangline.domain.errors import InvalidRequest
from gangline.machine.telemetry.logs import FIELDS, FewRefusals, LineFormatter, session_in_logs


def record(template: Any, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("gangline.node", logging.INFO, "file.py", 1, template, args, None)
    made.created, made.msecs = 0.0, 7.0
    made.__dict__.update(extra)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = LineFormatter("json").format(made)
    assert "\n" not in line
    return json.loads(line)


def test_text_is_for_people() -> None:
    line = LineFormatter().format(record("session.run session=%s attempt=%d", "t.0", 1))
    assert line == "1970-01-01T00:00:00.007Z INFO gangline.node session.run session=t.0 attempt=1"


def test_json_has_the_action_and_each_field_as_it_was() -> None:
    made = record("session.failed session=%s attempt=%d message=%s", "t.0", 2, "a=b and more")
    assert as_json(made) == {
        "at": "1970-01-01T00:00:00.007Z",
        "level": "info",
        "logger": "gangline.node",
        "action": "session.failed",
        "session": "t.0",
        "attempt": 2,
        "message": "a=b and more",
        "text": "session.failed session=t.0 attempt=2 message=a=b and more",
    }


def test_an_action_that_is_put_together_is_found() -> None:
    document = as_json(record("session.%s session=%s attempt=%d", "run", "t.0", 1))
    assert (document["action"], document["session"], document["attempt"]) == ("session.run", "t.0", 1)


def test_fields_that_stand_in_no_template_are_told() -> None:
    made = record("%s %s", "task.ended", "task=t", **{FIELDS: {"task": "t", "session": None, "status": "ended"}})
    document = as_json(made)
    assert (document["action"], document["task"], document["status"]) == ("task.ended", "t", "ended")
    assert "session" not in document


def test_lines_of_other_libraries_have_no_action() -> None:
    assert as_json(record("Task was destroyed but it is pending: 50%"))["action"] is None


@pytest.mark.parametrize(
    "forged", ["x\n2026-01-01T00:00:00.000Z ERROR gangline.node gate.paused", "\r\x1b[2J", "\u2028"]
)
def test_what_an_agent_says_cannot_forge_a_line(forged: str) -> None:
    line = LineFormatter().format(record("session.failed message=%s", forged))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert as_json(record("session.failed message=%s", forged))["message"] == forged


def test_a_traceback_stays_indented_below_its_line() -> None:
    made = record("request.crashed method=%s path=%s", "GET", "/")
    try:
        raise ValueError("broken\nERROR forged")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *rest = LineFormatter().format(made).splitlines()
    assert first.endswith("request.crashed method=GET path=/")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "ValueError: broken" in as_json(made)["exception"]


def test_lines_inside_a_sessions_work_name_it() -> None:
    with session_in_logs("t.7"):
        assert as_json(record("runtime.stop_failed runtime=%s", "r"))["session"] == "t.7"
        assert LineFormatter().format(record("runtime.stop_failed runtime=%s", "r")).endswith("runtime=r session=t.7")
        assert as_json(record("session.run session=%s", "other"))["session"] == "other"
    assert "session" not in as_json(record("runtime.stop_failed runtime=%s", "r"))


def test_numbers_that_json_does_not_have_are_text() -> None:
    assert as_json(record("gate.paused lease_s=%g", float("inf")))["lease_s"] == "inf"


def test_what_callers_cause_is_logged_so_often_in_a_minute_and_the_rest_is_counted() -> None:
    now = [0.0]
    few = FewRefusals("call.refused", per_minute=3, now=lambda: now[0])
    assert [few.filter(record("call.refused path=%s", "/")) for _ in range(10)] == [True] * 3 + [False] * 7
    assert few.filter(record("call.complete session=%s", "s"))
    now[0] = 61.0
    later = record("call.refused path=%s", "/")
    assert few.filter(later)
    assert as_json(later)["left_out"] == 7
    now[0] = 122.0
    quiet = record("call.refused path=%s", "/")
    assert few.filter(quiet)
    assert "left_out" not in as_json(quiet)


def test_at_level_debug_every_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gangline.node")
    few = FewRefusals("call.refused", per_minute=1)
    assert all(few.filter(record("call.refused path=%s", "/")) for _ in range(10))


def test_the_format_is_text_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_LOG_FORMAT", "json")
    assert read_log_format(None) == "json"
    assert read_log_format("text") == "text"
    with pytest.raises(InvalidRequest, match="text or json"):
        read_log_format("xml")
