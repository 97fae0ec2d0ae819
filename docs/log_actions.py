"""What the source logs: every call of a logger with its action, level and fields, found by reading the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gangline.machine.telemetry.actions import ACTIONS

SOURCE = Path(__file__).parents[1] / "src" / "gangline"

_LOGGERS = ("log", "_log")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_FIELD = re.compile(r"(\w+)=%")
_KIND = re.compile(r"(task|session|node|callback)\.[a-z_]+")
_EVENTS_FROM = "store"
"""The package whose constants name the server's durable events; each is logged under its kind."""


@dataclass(frozen=True)
class LogCall:
    """One call. `action`: as the template writes it, `%s` where it is put together."""

    where: str
    level: str
    action: str
    fields: tuple[str, ...]
    unnamed: int
    """Placeholders after the action that are no `name=%s`."""

    def means(self, action: str) -> bool:
        pattern = ".+".join(re.escape(piece) for piece in self.action.split("%s"))
        return re.fullmatch(pattern, action) is not None


def log_calls(source: Path = SOURCE) -> list[LogCall]:
    """All of them, in the order of files and lines."""
    return [call for path in sorted(source.rglob("*.py")) for call in _calls_in(path, source)]


def _calls_in(path: Path, source: Path) -> Iterator[LogCall]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=level), args=[*args]) if (
                logger in _LOGGERS and level in _LEVELS
            ):
                template = args[1] if level == "log" else args[0]
                where = f"{path.relative_to(source)}:{node.lineno}"
                text = template.value if isinstance(template, ast.Constant) else ""
                yield _call(where, "info" if level == "log" else level, str(text))


def _call(where: str, level: str, template: str) -> LogCall:
    action, _, rest = template.partition(" ")
    fields = tuple(_FIELD.findall(rest))
    unnamed = len(re.findall(r"%[^%]", rest)) - len(fields)
    return LogCall(where, "error" if level == "exception" else level, action.rstrip(":"), fields, unnamed)


def event_kinds(source: Path = SOURCE) -> set[str]:
    """Kinds of durable events, which the server logs as they are."""
    kinds: set[str] = set()
    for path in (source / _EVENTS_FROM).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _KIND.fullmatch(node.value):
                kinds.add(node.value)
    return kinds


def logs() -> str:
    """docs/reference/logs.md"""
    calls = log_calls()
    rows = [_row(action, meaning, calls) for action, meaning in ACTIONS.items()]
    return "\n".join((_INTRODUCTION, *rows)) + "\n"


_INTRODUCTION = """\
# Log lines

The commands that serve (`up`, `server`, `node`, `engine`) log to stderr; `gangline up` logs its children to
`DATA/logs`. Each line has an action, which is a stable name, and its fields:

```
2026-11-21T16:00:00.123Z INFO gangline.node session.run session=sum.0 attempt=1
```

`--log-format json`, or `GANGLINE_LOG_FORMAT=json`, makes each line an object: `at` (UTC), `level`, `logger`, `action`
(null for other libraries), the fields by name, `text` (the line as people read it), and `exception` where there is a
traceback. Lines on behalf of a session name it as `session`. Control characters are escaped: what agents and engines
say cannot forge a line. No line holds a key or a token.

Callers can cause `request.refused` and `call.refused`, so a process logs each at most 60 times a minute; the next line
has `left_out`, the number of missing lines. At level debug none is left out.

Actions with their fields follow; failures also have `message` or `error`. The level is info unless one is given. An
error needs a person; a warning mends itself.
"""


def _row(action: str, meaning: str, calls: list[LogCall]) -> str:
    exact = [call for call in calls if call.action == action]
    made_by = exact or [call for call in calls if call.action != "%s" and call.means(action)]
    levels = ", ".join(dict.fromkeys(call.level for call in made_by)) or "info"
    written = dict.fromkeys(field for call in made_by for field in call.fields)
    fields = _OF_EVENTS.get(action) or written or ("task",)
    shown = ", ".join(field for field in fields if field not in _USUAL)
    notes = "; ".join(filter(None, (levels if levels != "info" else "", shown)))
    return f"- `{action}`{f' ({notes})' if notes else ''}: {meaning}"


_USUAL = ("message", "error")
"""Fields that the introduction names."""
_OF_EVENTS: dict[str, tuple[str, ...]] = {
    "session.leased": ("task", "session", "node", "attempt"),
    "session.stage": ("task", "session", "node", "stage"),
    "session.requeued": ("task", "session", "node", "attempt", "boundary", "code", "message"),
    "session.released": ("task", "session", "node", "attempt"),
    "session.ended": ("task", "session", "outcome", "attempt", "node", "reward", "boundary", "code", "message"),
    "node.joined": ("node", "url"),
    "node.left": ("node",),
}
"""Fields of events, which stand in no template."""
