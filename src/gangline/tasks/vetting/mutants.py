"""Mutants of the reference solution: graders must accept equivalent mutants and reject the others."""

from __future__ import annotations

import base64
import re
import string
from collections.abc import Iterator

import msgspec

from gangline.tasks.vetting.grading import leaves
from gangline.tasks.vetting.subject import Solution, Subject
from gangline.tasks.vetting.trials import REPORT, Trial, program, solving

PRESERVING = "mutants.preserving"
BREAKING = "mutants.breaking"
POINTS = "mutants.point"
_NUM_POINTS = 3
_REPLACE = f"""
changed > "$V/list"
while IFS= read -r path; do
  [ -s "$path" ] && printf TEXT > "$path" && printf '%s\\n' "{REPORT} mutated $path" >&2
done < "$V/list"
"""
_MUTATE = """
changed > "$V/list"
if command -v python3 >/dev/null; then python3 -I - MODE "$V/list" <<'GANGLINE_VET_END'
PROGRAM
GANGLINE_VET_END
fi
"""
_ROTATED = str.maketrans(
    string.digits + string.ascii_letters,
    string.digits[1:]
    + string.digits[:1]
    + string.ascii_lowercase[1:]
    + string.ascii_lowercase[:1]
    + string.ascii_uppercase[1:]
    + string.ascii_uppercase[:1],
)
_COMMAND = re.compile(r"\\[A-Za-z]+|[^\\]+|\\")


def mutants(subject: Subject, solution: Solution) -> Iterator[Trial]:
    """`PRESERVING` ones must earn the top reward. No `BREAKING` one may, nor all of `POINTS`."""
    if solution.kind == "answer":
        yield from _answers(subject, solution)
        return
    yield solving(subject, solution, PRESERVING, after=_mutation("preserve"))
    yield solving(subject, solution, f"{BREAKING}.emptied", after=_REPLACE.replace("TEXT", "''"))
    yield solving(subject, solution, f"{BREAKING}.garbled", after=_REPLACE.replace("TEXT", "')(\\n'"))
    yield solving(subject, solution, f"{BREAKING}.hollow", after=_mutation("hollow"))
    if solution.kind != "patch":  # a patch changes few lines of its files, and tests need not cover the rest
        for at in range(_NUM_POINTS):
            yield solving(subject, solution, f"{POINTS}.{at + 1}", after=_mutation(f"point:{at}/{_NUM_POINTS}"))


def _mutation(mode: str) -> str:
    return _MUTATE.replace("MODE", mode).replace("PROGRAM", program("mutate"))


def _answers(subject: Subject, solution: Solution) -> Iterator[Trial]:
    right = solution.texts["answer"]
    same = f"{right}\n" if _is_literal(subject) else f"This is my answer, in another form.\n\n{right} \n"
    yield _answering(subject, solution, PRESERVING, same)
    wrong = _rotated(right)
    if wrong != right:
        yield _answering(subject, solution, f"{BREAKING}.other", wrong)


def _is_literal(subject: Subject) -> bool:
    """Whether an evaluator compares the whole text, so that words around an answer matter."""
    return any(leaf.get("strategy") == "test_on_output" for leaf in leaves(subject.evaluator))


def _answering(subject: Subject, solution: Solution, name: str, answer: str) -> Trial:
    stdin = base64.b64encode(answer.encode()).decode()
    return solving(subject, msgspec.structs.replace(solution, stdin=stdin), name)


def _rotated(answer: str) -> str:
    """Another answer of the same form: its digits, else its letters, are incremented. LaTeX commands are kept."""
    return "".join(
        part if part.startswith("\\") and len(part) > 1 else _next(part) for part in _COMMAND.findall(answer)
    )


def _next(text: str) -> str:
    has_digits = any(char.isdigit() for char in text)
    return "".join(char.translate(_ROTATED) if char.isdigit() or not has_digits else char for char in text)
