"""Grade one session of the families: 1 for the right answer with the right files, else 0.

Runs after the agent is gone, as its own user, with the standard library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

WORKDIR = Path(os.environ.get("GANGLINE_WORKDIR", "."))
"""Where the agent worked; here, for a grader that runs there as the same user."""


def read(name: str) -> str | None:
    """None for a file that is not there, or is not a file that the agent wrote itself."""
    path = WORKDIR / name
    return path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else None


def main() -> None:
    expected = json.loads(Path("expected.json").read_text())
    answer = (read("answer.txt") or "").strip()
    wrong = [path for path, content in expected["changed"].items() if read(path) != content]
    right = answer == expected["answer"] and not wrong
    Path("reward.json").write_text(json.dumps({"reward": float(right), "answer": answer, "wrong_files": wrong}))


if __name__ == "__main__":
    main()
