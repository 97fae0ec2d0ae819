"""Searches a fresh sandbox for a task's secrets: `python3 -I -c PROGRAM`, with a request as JSON on standard input.

The request: `groups`, name -> [lines, fraction of them that counts as a match]; `exact`, name -> a short secret;
`results`, the same for texts that are allowed in a task's own files, but not in variables or files named after a
solution; `folders`; `paths`, of which the existing ones are listed. The report is one line of JSON on standard error.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any, Dict, Iterator, List, Tuple

MOST_FILES, MOST_BYTES = 20_000, 1 << 20
SUSPECT = re.compile(
    r"environment variable|(answer|expected|solution|gold|oracle|reference|secret)[^/]*$", re.IGNORECASE
)
PASSED_OVER = {".git", ".gangline", "__pycache__", "proc", "sys", "dev"}


def places(folders: List[str]) -> Iterator[Tuple[str, str]]:
    """(place, text) of the environment, of files and of git's objects."""
    yield from (("environment variable " + name, value) for name, value in os.environ.items())
    num = 0
    for folder in folders:
        for where, below, names in os.walk(folder):
            below[:] = [one for one in below if one not in PASSED_OVER]
            for name in names:
                path = os.path.join(where, name)
                num += 1
                if num > MOST_FILES or os.path.islink(path):
                    continue
                try:
                    if os.path.getsize(path) <= MOST_BYTES:
                        with open(path, encoding="utf-8", errors="replace") as file:
                            yield path, file.read()
                except OSError:
                    continue
    yield from history()


def history() -> Iterator[Tuple[str, str]]:
    """Git objects in the working folder's repository that are not in its current commit."""
    try:
        listed = git("cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype) %(objectsize)")
        present = set(git("ls-tree", "-r", "--format=%(objectname)", "HEAD").split())
    except (OSError, subprocess.SubprocessError):
        return
    for line in listed.splitlines()[:MOST_FILES]:
        name, kind, size = line.split()
        if kind in ("blob", "commit", "tag") and name not in present and int(size) <= MOST_BYTES:
            yield "git object " + name[:12], git("cat-file", "-p", name)


def git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return found.stdout.decode("utf-8", "replace")


def exists(path: str, folders: List[str]) -> bool:
    if os.path.exists(path):
        return True
    name = os.path.basename(path)
    return any(name in names or name in below for folder in folders for _, below, names in os.walk(folder))


def main() -> None:
    asked: Dict[str, Any] = json.load(sys.stdin)
    found: Dict[str, str] = {}
    for place, text in places(asked["folders"]):
        for name, (lines, part) in asked["groups"].items():
            if name not in found and sum(line in text for line in lines) >= part * len(lines):
                found[name] = place
        secrets: Dict[str, str] = {**asked["exact"], **(asked["results"] if SUSPECT.search(place) else {})}
        for name, secret in secrets.items():
            if name not in found and text.strip() == secret:
                found[name] = place
    there = [path for path in asked["paths"] if exists(path, asked["folders"])]
    print("gangline-vet: search " + json.dumps({"found": found, "there": there}), file=sys.stderr)


main()
