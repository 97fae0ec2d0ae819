"""Commands that prepare a repository for an agent, without later commits in its history."""

from __future__ import annotations

import shlex
from typing import Any

from gangline.grading.untrusted.patch_text import completed
from gangline.tasks.presets.rows.swe_families import SweInstance

_GIT_TIMEOUT_S = 600.0
_BUG = "/tmp/gangline-bug.patch"

_FORGET_LATER_COMMITS = """
git config --global safe.directory '*' && git checkout -q --detach || exit
later=$(git rev-list --all --reflog --not HEAD -n 1)
git remote | while read -r name; do git remote remove "$name"; done
git for-each-ref --format='delete %(refname)' | git update-ref --stdin || exit
rm -f .git/FETCH_HEAD .git/ORIG_HEAD
[ -z "$later" ] || { git reflog expire --expire=now --all && git gc -q --prune=now; }
"""
"""Removes branches, tags and reflogs, which lead to later commits: many images contain the fix in their history."""

_AS_US = """
export GIT_AUTHOR_NAME=gangline GIT_AUTHOR_EMAIL=gangline@localhost GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=gangline GIT_COMMITTER_EMAIL=gangline@localhost GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
"""
NEW_REPOSITORY = f"""{_AS_US}
git init -q . && git add -A && git commit -q -m 'The repository as it is' && git checkout -q --detach
"""
"""The same files give the same commit in every sandbox."""

_BREAK = f"""{_AS_US}
git config --global safe.directory '*' && git apply --index --whitespace=nowarn {_BUG} || exit
rm -f {_BUG}
git checkout -q --detach "$(git commit-tree -m 'The repository as it is' "$(git write-tree)")"
"""
"""The bug's commit has no parent: the difference to its parent would be the solution."""

_FETCH = """
git config --global safe.directory '*' && git init -q . && git fetch -q {repository} {commit} &&
git checkout -q --detach FETCH_HEAD && rm .git/FETCH_HEAD
"""
"""Copies only objects that are reachable from the commit."""


def command(text: str) -> dict[str, Any]:
    """A prepare action that runs git."""
    return {"type": "exec", "command": text, "timeout_seconds": _GIT_TIMEOUT_S}


def at_its_commit(instance: SweInstance) -> list[dict[str, Any]]:
    """Prepare actions for the repository of the instance's image: apply the bug, and remove all traces of its
    solution.
    """
    hidden = [command(f"rm -rf {' '.join(map(shlex.quote, instance.hidden_folders))}")] * bool(instance.hidden_folders)
    return [*hidden, *_broken(instance), command(_FORGET_LATER_COMMITS)]


def fetched(instance: SweInstance, repository: str) -> list[dict[str, Any]]:
    """The same for a clone, given by its path inside the runtime. Only the history up to the commit is copied."""
    fetch = _FETCH.format(repository=shlex.quote(repository), commit=instance.base_commit or "HEAD")
    later = [command(_FORGET_LATER_COMMITS)] * bool(instance.bug_patch)
    return [command(fetch), *_broken(instance), *later]


def _broken(instance: SweInstance) -> list[dict[str, Any]]:
    if not instance.bug_patch:
        return []
    return [{"type": "write", "path": _BUG, "content": completed(instance.bug_patch)}, command(_BREAK)]
