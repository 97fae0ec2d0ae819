"""Commands that prepare a repository for an agent: no later commit is in its history."""

from __future__ import annotations

__all__ = ["FORGET_LATER_COMMITS", "NEW_REPOSITORY"]

FORGET_LATER_COMMITS = """
git config --global safe.directory '*' && git checkout -q --detach || exit
later=$(git rev-list --all --reflog --not HEAD -n 1)
git remote | while read -r name; do git remote remove "$name"; done
git for-each-ref --format='delete %(refname)' | git update-ref --stdin || exit
rm -f .git/FETCH_HEAD .git/ORIG_HEAD
[ -z "$later" ] || { git reflog expire --expire=now --all && git gc -q --prune=now; }
"""
"""Branches, tags and reflogs lead to later commits: many images have the fix in their history."""

NEW_REPOSITORY = """
export GIT_AUTHOR_NAME=gangline GIT_AUTHOR_EMAIL=gangline@localhost GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=gangline GIT_COMMITTER_EMAIL=gangline@localhost GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
git init -q . && git add -A && git commit -q -m 'The repository as it is' && git checkout -q --detach
"""
"""The same files are the same commit, in every sandbox."""
