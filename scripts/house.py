"""Measures of the source: entries, lines of code, files that a feature is spread over, names used twice.

`python scripts/house.py` prints them alongside their bounds, `--check` fails where one is passed. A bound is lowered
when its measure has fallen, and raised only by a decision that says why. Lines of code are neither blank, nor comments,
nor docstrings. Words of the documentation have a letter or a digit, code blocks included.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "gangline"
DOCS = Path(__file__).parents[1] / "docs"
WORD = re.compile(r"\S*[A-Za-z0-9]\S*")
"""Of a page; the bars of its tables are none."""

WINGS = frozenset({"interop", "serving", "tasks", "testing", "train"})
FEATURES = ("sampling_mask", "routed_experts")
BOUNDS = {
    "entries": 18,
    "code lines": 102_925,
    "code lines of the core": 67_185,
    "files that name sampling_mask": 12,
    "files that name routed_experts": 12,
    "class names used more than once": 139,
    "words of the documentation without decisions": 94_330,
}
_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
_WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str, tree: ast.Module) -> int:
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def measures() -> dict[str, int]:
    sizes, classes, named = Counter[str](), Counter[str](), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        sizes["core" if path.relative_to(SOURCE).parts[0] not in WINGS else "wings"] += code_lines(source, tree)
        classes.update(node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        named.update(feature for feature in FEATURES if feature in source)
    return {
        "entries": sum(1 for path in SOURCE.iterdir() if (path / "__init__.py").is_file()),
        "code lines": sizes.total(),
        "code lines of the core": sizes["core"],
        **{f"files that name {feature}": named[feature] for feature in FEATURES},
        "class names used more than once": sum(1 for num in classes.values() if num > 1),
        "words of the documentation without decisions": sum(
            len(WORD.findall(page.read_text())) for page in DOCS.rglob("*.md") if "adr" not in page.parts
        ),
    }


def main() -> int:
    found = measures()
    passed = [name for name, bound in BOUNDS.items() if found[name] > bound]
    for name, bound in BOUNDS.items():
        print(f"{name}: {found[name]:,} (at most {bound:,}){'  TOO MUCH' if name in passed else ''}")
    return 1 if passed and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
