"""Builds a dataset's folder: surveys all sessions, selects, and writes the rows of the selected ones.

The same sessions and settings give the same rows in the same order.

Its provenance has digests and versions of everything that produced its sessions.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gangline import __version__
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.domain.task import metadata_value, task_digest
from gangline.machine.durable import write_whole
from gangline.rows.conversations.chat import chat_messages, conversation_digest
from gangline.rows.conversations.conversation import Conversation, main_conversation
from gangline.tasks.datasets.index import Entry, Index, Split, Stratum
from gangline.tasks.datasets.kinds import Kind
from gangline.tasks.datasets.rows import rows_of_kind
from gangline.tasks.datasets.selection import HELD_OUT, Recorded, Selection, is_wanted, judged

_MOST_VALUES = 20
"""Maximum distinct values of one name; further ones are counted as `others`."""

_COUNTED = ("harnesses", "agents", "evaluators", "engines", "models", "tokenizers", "templates", "policy_versions")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Each name -> value -> number of sessions with it."""

    gangline: str
    num_tasks: int
    num_sessions: int
    tasks_digest: str
    """SHA-256 over the tasks' ids and content digests, in survey order."""
    selection: dict[str, Any]
    """All given settings, and the defaults."""
    selection_digest: str
    harnesses: dict[str, int]
    agents: dict[str, int]
    """Digests of the agent's complete setting: harness, model name, settings, tools, skills."""
    evaluators: dict[str, int]
    """Strategy and digest of its setting."""
    engines: dict[str, int]
    models: dict[str, int]
    tokenizers: dict[str, int]
    templates: dict[str, int]
    policy_versions: dict[str, int]


class Gathering:
    """Collects provenance in memory that does not depend on the number of sessions."""

    def __init__(self, selection: Selection, settings: dict[str, Any]) -> None:
        """settings: further ones that affect the rows, such as the split's."""
        self._selection = {**msgspec.to_builtins(selection), **settings}
        self._tasks = hashlib.sha256()
        self._num_tasks = self._num_sessions = 0
        self._last_task: str | None = None
        self._agent = self._evaluator = self._harness = "unknown"
        self._found: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}

    def add(self, recorded: Recorded) -> None:
        """Sessions of a task must be added consecutively."""
        result = recorded.result
        if result.task_id != self._last_task:
            self._begin_task(recorded)
        self._num_sessions += 1
        completions = result.completions
        held = [completion.certificate for completion in completions]
        self._count("harnesses", {self._harness})
        self._count("agents", {self._agent})
        self._count("evaluators", {self._evaluator})
        self._count("engines", {f"{one.engine} {one.engine_version}".strip() for one in held})
        self._count("models", {completion.model for completion in completions})
        self._count("tokenizers", {one.tokenizer_digest for one in held})
        self._count("templates", {one.template_digest for one in held})
        self._count("policy_versions", {str(span.version) for one in held for span in one.version_spans})

    def _begin_task(self, recorded: Recorded) -> None:
        self._last_task, task = recorded.result.task_id, recorded.task
        self._num_tasks += 1
        self._tasks.update(f"{self._last_task} {'' if task is None else task_digest(task)}\n".encode())
        if task is None:
            self._harness = self._agent = self._evaluator = "unknown"
            return
        self._harness = task.agent.harness
        self._agent = _short_digest(task.agent.model_dump_json(exclude_defaults=True))
        self._evaluator = f"{task.evaluator.strategy} {_short_digest(task.evaluator.model_dump_json())}"

    def _count(self, name: str, values: set[str]) -> None:
        counter = self._found[name]
        for value in values - {""}:
            counter[value if value in counter or len(counter) < _MOST_VALUES else "others"] += 1

    def done(self) -> Provenance:
        found = {name: dict(sorted(counter.items())) for name, counter in self._found.items()}
        return Provenance(
            gangline=__version__,
            num_tasks=self._num_tasks,
            num_sessions=self._num_sessions,
            tasks_digest=self._tasks.hexdigest(),
            selection=self._selection,
            selection_digest=_short_digest(msgspec.json.encode(self._selection, order="deterministic").decode()),
            **found,
        )


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


MANIFEST = "provenance.json"
_INDEX, _STAGED = ".index.sqlite", ".new"
_NONE = "(none)"
_INSTANCE_KEYS = ("instance_id", "task")
"""Metadata keys that identify a task's problem, as written by importers and by the field."""


class Source(Protocol):
    """Provides recorded sessions."""

    def sessions(self) -> Iterator[Recorded]:
        """Every session that ended, grouped by task."""
        ...

    def read(self, task_id: str, session_id: str) -> Recorded:
        """Read one of them again. Raises: NotFound."""
        ...


class DatasetSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kinds: tuple[Kind, ...] = (Kind.messages,)
    """The first one is the default on loading."""
    selection: Selection = Selection()
    by: str = "repo"
    """Metadata key of the tasks by which the split is stratified, and which the card's table lists."""
    test_share: float = 0.1
    """Fraction of the problems in each stratum."""
    seed: int = 0
    """Seed of the split."""


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Relative to the folder."""
    kind: Kind
    split: Split
    num_rows: int
    sha256: str


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """A built folder, as described by its manifest."""

    name: str
    by: str
    files: tuple[TableFile, ...]
    strata: tuple[Stratum, ...]
    reasons: dict[str, int]
    """`rejected: WHY` or `left out: WHY` -> number of sessions."""
    provenance: Provenance


def build(spec: DatasetSpec, source: Source, folder: Path, *, on_session: Callable[[], None] = lambda: None) -> Dataset:
    """on_session: called for each session of the survey. The card is written by `card`.

    Raises: InvalidRequest if the folder contains something else; NotFound if there are no rows.
    """
    _prepare(folder)
    settings = {"by": spec.by, "test_share": spec.test_share, "seed": spec.seed}
    gathering = Gathering(spec.selection, settings)
    num_held_out = 0
    with Index(folder / _INDEX, spec.seed) as index:
        for recorded in source.sessions():
            if recorded.result.held_out and not spec.selection.held_out:
                num_held_out += is_wanted(spec.selection, recorded.metadata)
            elif is_wanted(spec.selection, recorded.metadata):
                gathering.add(recorded)
                index.add(_entry(spec, recorded))
            on_session()
        strata = index.decide(
            duplicates=spec.selection.duplicates, per_task=spec.selection.per_task, test_share=spec.test_share
        )
        reasons = ({HELD_OUT: num_held_out} if num_held_out else {}) | index.reasons()
        files = tuple(_written(spec, index, source, folder / _STAGED))
    if not files:
        shutil.rmtree(folder / _STAGED)
        why_none = ", ".join(f"{why} ({number})" for why, number in reasons.items()) or "no session has ended"
        way_out = " `--held-out include` takes the held-out ones." if num_held_out else ""
        raise NotFound(f"there is nothing to write: {why_none}.{way_out}")
    made = Dataset(
        name=spec.name,
        by=spec.by,
        files=files,
        strata=tuple(strata),
        reasons=reasons,
        provenance=gathering.done(),
    )
    # The manifest comes first: it shows the next run that the folders of kinds are ours.
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    _replace_kinds(folder)
    return made


def _prepare(folder: Path) -> None:
    """An earlier dataset is kept until it can be replaced; a folder with other content is refused."""
    there = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    if MANIFEST in there:
        read_manifest(folder)
    elif there - {_INDEX, _STAGED}:
        raise InvalidRequest(f"{folder} is not empty, and no dataset of ours: name another folder with --out.")
    if (folder / _STAGED).exists():  # left by a run that was killed
        shutil.rmtree(folder / _STAGED)
    (folder / _STAGED).mkdir(parents=True)


def _replace_kinds(folder: Path) -> None:
    for kind in Kind:
        old, new = folder / kind, folder / _STAGED / kind
        if old.exists():
            shutil.rmtree(old)
        if new.exists():
            new.rename(old)
    (folder / _STAGED).rmdir()


def read_manifest(folder: Path) -> Dataset:
    """Raises: InvalidRequest."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Dataset)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{folder} holds no dataset of `gangline data`: {error}") from error


def _entry(spec: DatasetSpec, recorded: Recorded) -> Entry:
    result, metadata = recorded.result, recorded.metadata
    talk = main_conversation(result.completions)
    verdict = judged(spec.selection, recorded, talk)
    return Entry(
        task_id=result.task_id,
        session_id=result.session_id,
        instance=_instance(recorded),
        stratum=metadata_value(metadata, spec.by) or _NONE,
        standing=verdict.standing,
        why=verdict.why,
        reward=result.reward,
        num_tokens=0 if talk is None else talk.num_tokens,
        digest=b"" if talk is None or verdict.standing == "left_out" else _digest(talk),
    )


def _digest(talk: Conversation) -> bytes:
    return conversation_digest(chat_messages(talk.messages))


def _instance(recorded: Recorded) -> str:
    """The problem's own name, or a digest of its text, which is the same for every task with that problem."""
    if recorded.task is None:
        return recorded.result.task_id
    named = (recorded.metadata.get(key) for key in _INSTANCE_KEYS)
    found = next((name for name in named if isinstance(name, str) and name), None)
    if found is not None:
        return found
    text: Any = (recorded.task.instruction, recorded.metadata)
    return hashlib.sha256(msgspec.json.encode(text, order="deterministic")).hexdigest()[:16]


def _written(spec: DatasetSpec, index: Index, source: Source, folder: Path) -> Iterator[TableFile]:
    from gangline.tasks.datasets.parquet import write_table  # noqa: PLC0415 - it needs an extra

    splits: tuple[Split, ...] = ("train", "test")
    for kind in spec.kinds:
        for split in splits:
            path = folder / kind / f"{split}.parquet"
            num = write_table(kind, rows_of_kind(kind, index, source.read, split), path)
            if num == 0:
                path.unlink()
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            name = path.relative_to(folder).as_posix()
            yield TableFile(path=name, kind=kind, split=split, num_rows=num, sha256=digest)
