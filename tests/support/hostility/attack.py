"""One attack: its name, the asset it is after, and its run, which returns the evidence when it succeeded.

An attack from inside is a plain function in our own source: its source goes into the sandbox behind that of `kit`, so
it may use only the names of `kit`, its argument, and its own imports.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import textwrap
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gangline.domain.sandbox import ExecResult
from support.hostility import kit

if TYPE_CHECKING:
    from support.hostility.grounds import Grounds

__all__ = ["Attack", "Attacks", "Program", "Verdict", "program_source", "verdicts_of"]

Program = Callable[[dict[str, Any]], "str | None"]


Assault = Callable[["Grounds"], Coroutine[Any, Any, "str | None"]]
"""The run of an attack that acts inside and looks from outside."""


Outcome = Literal["held", "breached", "absent", "broken"]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    told: str = ""
    """Evidence of a breach, or the way in which the attack was refused."""


@dataclass(frozen=True)
class Attack:
    name: str
    """A sentence without its subject, the agent: `reads_the_environment_of_a_process_of_the_host`."""
    asset: str
    """Row of the threat model."""
    needs_isolation: bool
    """Only a runtime that promises isolation is attacked so."""
    program: Program | None = None
    """Runs in the shared sandbox, and is the whole attack."""
    victim: Literal["host", "other"] = "host"
    """Whom the program is aimed at."""
    place: Literal["shared", "listed"] = "shared"
    """Where the program runs: the sandbox that most share, or one that has network `list`."""
    run: Assault | None = None
    """The attack where it is more than a program. Raises: unittest.SkipTest when the runtime says that it does not
    defend this."""


class Attacks:
    """The attacks of one module, in their order."""

    def __init__(self, asset: str) -> None:
        self._asset = asset
        self.all: list[Attack] = []

    def inside(self, program: Program) -> Program:
        """Register a program that runs inside the shared sandbox."""
        self.all.append(Attack(program.__name__, self._asset, needs_isolation=True, program=program))
        return program

    def against_both(self, program: Program) -> Program:
        """Register a program twice: its `victim` is a process of the host, and the agent of another sandbox."""
        whole = Attack(f"{program.__name__}_of_the_host", self._asset, needs_isolation=True, program=program)
        self.all += [whole, replace(whole, name=f"{program.__name__}_of_another_sandbox", victim="other")]
        return program

    def listed(self, program: Program) -> Program:
        """Register a program that runs in a sandbox with network `list`."""
        self.all.append(Attack(program.__name__, self._asset, needs_isolation=True, program=program, place="listed"))
        return program

    def add(self, name: str, run: Assault, *, needs_isolation: bool) -> None:
        """Register one attack of several that have the same body."""
        self.all.append(Attack(name, self._asset, needs_isolation, run=run))

    def around(self, *, needs_isolation: bool = True) -> Callable[[Assault], Assault]:
        """Register an attack that acts inside and looks from outside."""

        def add(assault: Assault) -> Assault:
            self.all.append(Attack(assault.__name__, self._asset, needs_isolation, run=assault))
            return assault

        return add


def program_source(programs: Mapping[str, tuple[Program, Mapping[str, Any]]]) -> str:
    """The whole input of `python3 -` to run programs one after the other: name -> program and its argument."""
    sources = dict.fromkeys(_source(program) for program, _given in programs.values())
    calls = [
        f"    {name!r}: ({program.__name__}, {json.dumps(given)!r})," for name, (program, given) in programs.items()
    ]
    return "\n".join([inspect.getsource(kit), *sources, "run_all({", *calls, "})", ""])


def _source(program: Program) -> str:
    lines = textwrap.dedent(inspect.getsource(program)).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("def "))
    return "\n".join(lines[begin:]) + "\n"


def verdicts_of(result: ExecResult) -> dict[str, Verdict]:
    """Read the lines of programs. Those that are missing have said nothing."""
    found: dict[str, Verdict] = {}
    for line in result.stdout.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            found[told["attack"]] = Verdict(told["verdict"], told["told"])
    return found
