"""Finds which run started from which, by digests of their inputs and outputs, never by paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.train.runs.records import Parent
from gangline.train.runs.store import Run, RunReader, run_folders


class Relative(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the ancestry of another."""

    run: str
    generation: int
    """1 is a parent or a child."""
    by: Literal["model", "checkpoint"]
    """What the younger run took from the older one."""
    step: int
    """Steps that the older run had done."""
    is_here: bool = True
    """False if its folder no longer exists, and only the younger run's record names it."""


class Ancestry(msgspec.Struct, frozen=True, kw_only=True):
    """The ancestors and descendants of a run, nearest first."""

    ancestors: tuple[Relative, ...]
    descendants: tuple[Relative, ...]


def readable_runs(data_dir: Path) -> list[Run]:
    """Every run of a data folder, except runs that this version cannot read."""
    found: list[Run] = []
    for folder in run_folders(data_dir):
        with suppress(InvalidRequest):
            found.append(RunReader(folder).read())
    return found


def parents_of(name: str, digests: Collection[str], runs: Sequence[Run]) -> tuple[Parent, ...]:
    """The runs other than `name` that produced a model or a checkpoint with one of these digests."""
    return tuple(_known(name, digests, _made_by(runs)))


def ancestry_of(run: Run, runs: Sequence[Run]) -> Ancestry:
    """runs: all runs of its data folder; copies of `run` among them are left out."""
    present = [run, *(one for one in runs if one.lives[0] != run.lives[0])]
    made_by = _made_by(present)
    parents = {one.summary.name: _parents(one, made_by) for one in present}
    children: dict[str, list[Relative]] = defaultdict(list)
    for child, found in parents.items():
        for parent in found:
            children[parent.run].append(msgspec.structs.replace(parent, run=child, is_here=True))
    name = run.summary.name
    return Ancestry(ancestors=_generations(name, parents), descendants=_generations(name, children))


def _generations(name: str, nearest: Mapping[str, list[Relative]]) -> tuple[Relative, ...]:
    seen, found, names, generation = {name}, list[Relative](), [name], 0
    while names:
        generation += 1
        relatives = {one.run: one for older in names for one in nearest.get(older, ()) if one.run not in seen}
        found += [msgspec.structs.replace(relative, generation=generation) for relative in relatives.values()]
        names = list(relatives)
        seen |= set(names)
    return tuple(found)


def _parents(run: Run, made_by: Mapping[str, list[Parent]]) -> list[Relative]:
    """Existing parents, found by digest, and removed ones, from the run's own record."""
    began_from = {digest for life in run.lives for digest in (life.model_digest, life.checkpoint_digest)}
    here = _known(run.summary.name, began_from, made_by)
    digests = {parent.digest for parent in here}
    gone = {parent.run: parent for life in run.lives for parent in life.parents if parent.digest not in digests}
    return [
        Relative(run=parent.run, generation=1, by=parent.by, step=parent.step, is_here=is_here)
        for parents, is_here in ((here, True), (list(gone.values()), False))
        for parent in parents
    ]


def _known(name: str, digests: Collection[str], made_by: Mapping[str, list[Parent]]) -> list[Parent]:
    found = (parent for digest in sorted(digests) for parent in made_by.get(digest, ()) if parent.run != name)
    return list(dict.fromkeys(found))  # copied folders do not repeat a parent


def _made_by(runs: Sequence[Run]) -> dict[str, list[Parent]]:
    """Digest of a model or a checkpoint -> the runs that produced it."""
    made_by: dict[str, list[Parent]] = defaultdict(list)
    for run in runs:
        for digest, made in _made(run).items():
            made_by[digest].append(made)
    return made_by


def _made(run: Run) -> dict[str, Parent]:
    """Digest -> what the run produced. A model or a checkpoint that the run started from is not included."""
    first, name = run.lives[0], run.summary.name
    found = [
        Parent(run=name, by="checkpoint", step=checkpoint.step, digest=checkpoint.digest)
        for checkpoint in run.checkpoints
    ]
    found += [
        Parent(run=name, by="model", step=checkpoint.step, digest=checkpoint.weights_digest)
        for checkpoint in run.checkpoints
    ]
    if (results := run.results) is not None:
        found.append(Parent(run=name, by="model", step=results.num_steps, digest=results.weights_digest))
    not_its_own = {"", first.model_digest, first.checkpoint_digest}
    return {one.digest: one for one in reversed(found) if one.digest not in not_its_own}
