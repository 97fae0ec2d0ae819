"""The audit of one task: trials in stages, because later ones depend on the results of earlier ones.

First the reference solution and doing nothing; then cheats, the search, mutants and conditions; finally, if the
combined conditions made a difference, each one alone. A task that rewards doing nothing is not tried further.

A session that failed through the service's fault is tried again. If it fails again, the audit is incomplete and reports
its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from gangline.domain.errors import GanglineError
from gangline.domain.session import SessionResult
from gangline.tasks.vetting.checks import CheckResult, checked, is_top, not_checked, of_all_steps
from gangline.tasks.vetting.conditions import all_conditions, each_condition
from gangline.tasks.vetting.evidence import Evidence, evidence_of
from gangline.tasks.vetting.mutants import mutants
from gangline.tasks.vetting.panel import panel
from gangline.tasks.vetting.searching import search
from gangline.tasks.vetting.subject import Subject
from gangline.tasks.vetting.trials import Trial, scripted, solving

RunTrial = Callable[[Trial, int], Awaitable[list[SessionResult]]]
"""(trial, run) -> its sessions, through the service. A later run starts new sessions."""
_MOST_RUNS = 3


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one task's audit."""

    checks: dict[str, CheckResult]
    evidence: tuple[Evidence, ...]


async def audit(subject: Subject, run: RunTrial, *, num_runs: int = 5) -> Audited:
    """The audit of a task, or of each of its steps. num_runs: sessions of each reference solution.

    Raises: GanglineError if the service could not run a trial.
    """
    if not subject.steps:
        return await Audit(subject, run, num_runs=num_runs).result()
    checks = dict[str, dict[str, CheckResult]]()
    evidence = list[Evidence]()
    for number, step in enumerate(subject.steps, start=1):
        assert step.step is not None
        of_step = await Audit(step, _of_step(number, run), num_runs=num_runs).result()
        checks[step.step["name"]] = of_step.checks
        evidence += [msgspec.structs.replace(one, trial=f"step-{number}.{one.trial}") for one in of_step.evidence]
    return Audited(checks=of_all_steps(checks), evidence=tuple(evidence))


def _of_step(number: int, run: RunTrial) -> RunTrial:
    async def named(trial: Trial, at: int) -> list[SessionResult]:
        return await run(msgspec.structs.replace(trial, name=f"step-{number}.{trial.name}"), at)

    return named


class Audit:
    """Audits one task or step. Call `result()` once."""

    def __init__(self, subject: Subject, run: RunTrial, *, num_runs: int = 5) -> None:
        """num_runs: sessions of the reference solution."""
        self._subject = subject
        self._run = run
        self._num_runs = num_runs
        self._tried: dict[str, list[Evidence]] = {}

    async def result(self) -> Audited:
        """Raises: GanglineError if the service could not run a trial."""
        subject, solution = self._subject, self._subject.solution
        if subject.blocked:
            return Audited(checks=not_checked(subject.blocked), evidence=())
        # Doing nothing comes first: a grader that has graded the solution is known to work, which this does not assume.
        await self._all([scripted(subject, "floor", "exit 0")])
        if solution is not None:
            await self._all([solving(subject, solution, "oracle", num_samples=self._num_runs)])
        if any((one.reward or 0.0) > subject.floor for one in self._tried["floor"]):
            return self._audited()
        oracle = self._tried.get("oracle", [])
        is_solved = solution is not None and all(is_top(subject, one) for one in oracle)
        written = oracle[0] if oracle else None
        second = list(panel(subject, () if written is None else written.changed))
        second.append(search(subject, {} if written is None else written.results))
        if solution is not None and is_solved:
            second += mutants(subject, solution)
            if (conditions := all_conditions(subject, solution)) is not None:
                second.append(conditions)
        await self._all(second)
        if solution is not None and not all(is_top(subject, one) for one in self._tried.get("conditions", ())):
            await self._all(each_condition(subject, solution))
        return self._audited()

    def _audited(self) -> Audited:
        evidence = (msgspec.structs.replace(one, reports="") for mine in self._tried.values() for one in mine)
        return Audited(checks=checked(self._subject, self._tried), evidence=tuple(evidence))

    async def _all(self, trials: Iterable[Trial]) -> None:
        """Raises: GanglineError of the first trial that could not be run."""
        try:
            async with asyncio.TaskGroup() as group:
                for trial in trials:
                    group.create_task(self._one(trial))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, trial: Trial) -> None:
        """Raises: GanglineError."""
        found: list[Evidence] = []
        for run in range(1, _MOST_RUNS + 1):
            found = evidence_of(trial.name, await self._run(trial, run))
            if not any(one.is_ours for one in found):
                self._tried[trial.name] = found
                return
        why = next(one for one in found if one.is_ours)
        raise GanglineError(f"{self._subject.name}: trial {trial.name} could not be run: {why.described()}")
