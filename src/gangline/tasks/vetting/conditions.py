"""Grading conditions under which a sound grader gives the same reward: another day, tests in reverse order, a second
run in the same place, no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from gangline.tasks.vetting.grading import with_command
from gangline.tasks.vetting.subject import Solution, Subject
from gangline.tasks.vetting.trials import Trial, program, solving

Condition = Literal["clock", "order", "earlier_runs", "network"]
CONDITIONS: dict[Condition, str] = {
    "clock": "on another day",
    "order": "with its tests in reverse",
    "earlier_runs": "graded a second time in the same place",
    "network": "without network",
}
"""Name -> the condition in the wording of a finding."""

_FOLDER = """
vet=$(mktemp -d) && chmod 755 "$vet"
export PYTHONPATH="$vet${PYTHONPATH:+:$PYTHONPATH}"
"""
_CLOCK = """
export TZ=UTC-13
mkdir "$vet/bin" && cat > "$vet/bin/date" <<'GANGLINE_VET_END'
#!/bin/sh
case " $* " in *" -d"*|*" --date"*|*" -r"*) exec /bin/date "$@";; esac
exec /bin/date -d '400 days' "$@"
GANGLINE_VET_END
chmod 755 "$vet/bin/date" && export PATH="$vet/bin:$PATH" GANGLINE_VET_CLOCK=1
"""
_ORDER = """
export GANGLINE_VET_ORDER=1
cat > "$vet/gangline_vet_order.py" <<'GANGLINE_VET_END'
def pytest_collection_modifyitems(items):
    items.reverse()
GANGLINE_VET_END
export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -p gangline_vet_order"
"""
_CUSTOMIZE = """
cat > "$vet/sitecustomize.py" <<'GANGLINE_VET_END'
PROGRAM
GANGLINE_VET_END
"""


def all_conditions(subject: Subject, solution: Solution) -> Trial | None:
    """All applicable conditions at once; None if there are none."""
    wanted = _applicable(subject)
    return _under(subject, solution, "conditions", wanted) if wanted else None


def each_condition(subject: Subject, solution: Solution) -> Iterator[Trial]:
    """Each condition alone, to find the one that makes a difference."""
    for one in _applicable(subject):
        yield _under(subject, solution, f"conditions.{one}", [one])


def _applicable(subject: Subject) -> list[Condition]:
    runs = with_command(subject.evaluator, before="", again=False) is not None
    found: list[Condition] = ["clock", "order", "earlier_runs"] if runs else []
    if runs and subject.runtime.get("network", "proxy") != "none":
        found.append("network")
    return found


def _under(subject: Subject, solution: Solution, name: str, wanted: Sequence[Condition]) -> Trial:
    code = _FOLDER
    if "clock" in wanted:
        code += _CLOCK
    if "order" in wanted:
        code += _ORDER
    if {"clock", "order"} & set(wanted):
        code += _CUSTOMIZE.replace("PROGRAM", program("conditions"))
    evaluator = with_command(subject.evaluator, before=code, again="earlier_runs" in wanted)
    runtime = _offline(subject.runtime) if "network" in wanted else None
    return solving(subject, solution, name, evaluator=evaluator, runtime=runtime)


def _offline(runtime: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in runtime.items() if name != "network_allow"} | {"network": "none"}
