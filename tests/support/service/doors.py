"""The three doors of README.md: what stands there to be run, and shorter lines for training."""

from __future__ import annotations

from pathlib import Path

from support.service.terminal import Block, blocks

__all__ = ["DOORS", "README", "SHORTER", "door", "shell_script"]

README = Path(__file__).parents[3] / "README.md"
DOORS = ("Capture for my trainer", "Evaluate an agent", "Train end to end")
_MAKE_RUN = "gangline init my-run && cd my-run && python3 tasks.py"
_MAKE_EVAL = "gangline init my-eval && cd my-eval && python3 tasks.py 8"
SHORTER = {
    _MAKE_RUN: f"{_MAKE_RUN} 8 2",
    f"{_MAKE_EVAL} 16": f"{_MAKE_EVAL} 4",
    "gangline train run experiment.yaml": "gangline train run experiment.yaml --steps 1",
}


def door(title: str) -> str:
    """The text below its heading."""
    return README.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def shell_script(title: str) -> str:
    """One script of a door's commands, shorter, that ends the service which it starts."""
    return "".join(_shell(block) for block in blocks(door(title)) if block.kind != "text")


def _shell(block: Block) -> str:
    if block.text == "gangline up\n":
        return (
            "gangline up > up.log 2>&1 &\n"
            "trap 'gangline down' EXIT\n"
            "until [ -e .gangline/up.json ]; do kill -0 $! || { cat up.log >&2; exit 1; }; sleep 0.1; done\n"
        )
    if block.kind == "python":
        return f"python3 - <<'END_OF_PROGRAM'\n{block.text}END_OF_PROGRAM\n"
    return "".join(f"{SHORTER.get(line, line)}\n" for line in block.text.splitlines())
