"""The catalogue of benchmarks, and the one that a name means."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from gangline.domain.errors import InvalidRequest

_BARE = re.compile(r"[A-Za-z][\w.-]*(@[\w./-]+)?")


class Benchmark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the catalogue."""

    name: str = ""
    about: str
    tasks: int
    """Number of tasks of the first split."""
    license: str
    kind: Literal["hub", "git", "program"]
    """A dataset of Hugging Face, a Git repository with a folder for each task, or a program that lists its tasks."""
    source: str
    """Name of the dataset, URL of the repository, or a source of `gangline tasks from`."""
    revision: str
    """Commit, or a branch, which is not pinned."""
    splits: tuple[str, ...] = ()
    """The default first."""
    files: str = ""
    """Pattern of a split's files below the dataset's folder; `{split}` is filled in."""
    megabytes: float | None = None
    """Size of the first split's files, without images; None if unknown."""
    format: Literal["harbor", "swe"] | None = None
    preset: str | None = None
    map: dict[str, str] = {}
    ask: str = ""
    """Added to each instruction: how the answer is to be given."""
    prefix: str | None = None
    """Begins the ids of tasks whose ids in the source are numbers."""
    agent: dict[str, Any] | None = None
    """Agent of `gangline eval` for tasks without one. Default: `native` as it is."""
    image: str = "none"
    grader: str
    needs: str = ""
    commands: tuple[str, ...] = ()
    """Install a program; `{revision}` is filled in."""
    cite: str

    @property
    def is_pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    @property
    def url(self) -> str:
        """Where its files are at that revision."""
        if self.kind == "hub":
            return f"https://huggingface.co/datasets/{self.source}/tree/{self.revision}"
        where = self.cite if self.kind == "program" else self.source
        return f"{where.removesuffix('.git')}/tree/{self.revision}"

    def pattern(self, split: str | None) -> str:
        """Raises: InvalidRequest if there is no such split."""
        if split is not None and split not in self.splits:
            raise InvalidRequest(f"--split {split}: {self.name} has {', '.join(self.splits) or 'none'}.")
        return self.files.replace("{split}", split or "".join(self.splits[:1]))


@cache
def catalogue() -> dict[str, Benchmark]:
    """Name -> benchmark, in the file's order."""
    data = resources.files("gangline.tasks.benchmarks").joinpath("catalogue.toml").read_bytes()
    found = msgspec.toml.decode(data, type=dict[str, Benchmark])
    return {name: msgspec.structs.replace(one, name=name) for name, one in found.items()}


def named_benchmark(source: str, *, is_certain: bool = False) -> Benchmark | None:
    """The benchmark that `NAME` or `NAME@REVISION` means, at that revision; None if a file or another source is meant.

    is_certain: nothing but a benchmark can be meant.

    Raises: InvalidRequest for a name that is a file as well, or neither.
    """
    if not _BARE.fullmatch(source):
        if is_certain:
            raise InvalidRequest(f"{source}: is not the name of a benchmark, which an option given here is for.")
        return None
    name, _, revision = source.partition("@")
    one, is_file = catalogue().get(name), Path(source).exists()
    if one is None:
        if not is_certain and (is_file or Path(source).suffix):
            return None
        near = difflib.get_close_matches(name.lower(), catalogue(), n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InvalidRequest(
            f"{source}: is neither a file nor a benchmark.{hint} `gangline tasks names` lists the benchmarks."
        )
    if is_file and not is_certain:
        raise InvalidRequest(
            f"{source}: is a benchmark, and a file or folder here has that name. Write ./{source} to read that as it "
            f"is, {source} --from {source} to read it as the benchmark's files, or {name}@{one.revision} to fetch them."
        )
    return msgspec.structs.replace(one, revision=revision) if revision else one
