"""Mutates the files that a solution wrote: `python3 -I - MODE LIST`, where LIST contains one path per line.

Modes: `hollow` removes their behaviour, `preserve` rewrites them without changing it, and `point:K/N` changes the K-th
of N places that are spread over their code. Prints each change to standard error.
"""

import ast
import json
import string
import sys
from typing import Any, List, Optional, Tuple

REPORT = "gangline-vet: mutated"
ROTATED = bytes.maketrans(
    (string.digits + string.ascii_letters).encode(),
    (
        string.digits[1:]
        + string.digits[:1]
        + string.ascii_lowercase[1:]
        + string.ascii_lowercase[:1]
        + string.ascii_uppercase[1:]
        + string.ascii_uppercase[:1]
    ).encode(),
)
INVERTED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OTHER = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


class Hollow(ast.NodeTransformer):
    """Functions return nothing, and nothing is printed."""

    def __init__(self) -> None:
        self.num = 0

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is None:
            return node
        self.num += 1
        return ast.copy_location(ast.Return(value=ast.Constant(value=None)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            self.num += 1
            return ast.copy_location(ast.Constant(value=None), node)
        return node


class Named(ast.NodeTransformer):
    """Each function assigns its result to a name before returning it."""

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None:
            return node
        name = "value_in_another_form"
        kept = ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=node.value)
        result = ast.Return(value=ast.Name(id=name, ctx=ast.Load()))
        return [ast.copy_location(kept, node), ast.copy_location(result, node)]


def points(tree: ast.AST) -> List[Tuple[Any, str]]:
    """Places where a change alters behaviour, each with its kind, in source order."""
    found: List[Tuple[Any, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in INVERTED:
            found.append((node, "comparison"))
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            found.append((node, "operator"))
        elif isinstance(node, ast.Return) and node.value is not None and not is_nothing(node.value):
            found.append((node, "return"))
        elif isinstance(node, ast.BoolOp):
            found.append((node, "and/or"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            found.append((node, "number"))
    return sorted(found, key=lambda one: (one[0].lineno, one[0].col_offset))


def is_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def change(node: Any, kind: str) -> None:
    if kind == "comparison":
        node.ops[0] = INVERTED[type(node.ops[0])]()
    elif kind == "operator":
        node.op = OTHER[type(node.op)]()
    elif kind == "return":
        node.value = ast.copy_location(ast.Constant(value=None), node.value)
    elif kind == "and/or":
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    else:
        node.value = node.value + 1


def printed(source: str, tree: ast.AST) -> str:
    first = source.split("\n", 1)[0]
    head = first + "\n" if first.startswith("#!") else ""
    return head + ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def parsed(path: str) -> Optional[Tuple[str, ast.AST]]:
    """Source and tree of a Python file; None if it is not valid Python."""
    if not path.endswith(".py"):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        return source, ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None


def say(text: str) -> None:
    print(REPORT, text, file=sys.stderr)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 24)
    except OSError:
        return b""


def hollow(paths: List[str]) -> None:
    for path in paths:
        found = parsed(path)
        if found is not None:
            source, tree = found
            hollowed = Hollow()
            tree = hollowed.visit(tree)
            write(path, printed(source, tree) if hollowed.num else "")
            say(path)
            continue
        data = read(path)
        if data.translate(ROTATED) != data:
            with open(path, "wb") as file:
                file.write(data.translate(ROTATED))
            say(path)


def preserve(paths: List[str]) -> None:
    for path in paths:
        found = parsed(path)
        if found is not None:
            source, tree = found
            write(path, printed(source, Named().visit(tree)) + "\n# The same program in another form.\n")
            say(path)
        elif path.endswith(".json"):
            try:
                value = json.loads(read(path))
            except ValueError:
                continue
            write(path, json.dumps(value, indent=3) + "\n")
            say(path)


def point(paths: List[str], number: int, total: int) -> None:
    """Does nothing unless all written files are Python: a program that made other files has already done its work."""
    files = [path for path in paths if read(path).strip()]
    trees = {path: tree for path in files for tree in [parsed(path)] if tree is not None}
    if not files or len(trees) < len(files):
        return
    places = [(path, node, kind) for path in files for node, kind in points(trees[path][1])]
    if len(places) < total:
        return
    path, node, kind = places[(2 * number + 1) * len(places) // (2 * total)]
    line = node.lineno
    change(node, kind)
    write(path, printed(*trees[path]))
    say(f"{path}:{line} {kind}")


def main() -> None:
    mode, listing = sys.argv[1:]
    with open(listing, encoding="utf-8", errors="surrogateescape") as file:
        paths = sorted(line for line in file.read().split("\n") if line)
    if mode == "hollow":
        hollow(paths)
    elif mode == "preserve":
        preserve(paths)
    else:
        number, _, total = mode.partition(":")[2].partition("/")
        point(paths, int(number), int(total))


main()
