"""Evaluator `math`, in its child process, and math-verify's own tests through our comparison."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tarfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.child_work import Limits
from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.domain.ids import new_id
from gangline.grading.untrusted.isolated import ForkServers, in_child
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_module
from support.training.evaluation_samples import a_context, a_trace, said


@pytest.fixture(autouse=True)
def _installed() -> None:
    need_module("math_verify", "pip install 'gangline[math]'")


servers = ForkServers()


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Generator[None]:
    yield
    asyncio.run(servers.close())


async def graded(tmp_path: Path, answer: str | list[str], text: str | None, **config: Any) -> Reward:
    evaluator = plugins.make_evaluator("math", {"answer": answer, **config})
    traces = () if text is None else (a_trace(said("assistant", text)),)
    runtime = FolderRuntime(tmp_path / new_id("runtime"))
    context = msgspec.structs.replace(a_context(runtime, traces=traces), child_work=servers)
    return await evaluator.evaluate(context)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", r"So \boxed{42}.", 1.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0),
        (r"$\frac{1}{2}$", r"\boxed{\dfrac12}", 1.0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        ("[0, 1)", r"\boxed{[0,1)}", 1.0),
        ("[0, 1)", r"\boxed{[0,1]}", 0.0),
        (r"x^2 - 1", r"\boxed{(x-1)(x+1)}", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1.0),
        ("42", r"First \boxed{42}, but no: \boxed{43}", 0.0),
        ("42", r"<think>It is \boxed{42}</think> \boxed{41}", 0.0),
        ("42", "I will not say.", 0.0),
        ("42", "", 0.0),
    ],
)
async def test_an_answer_counts_by_its_mathematics(tmp_path: Path, answer: str, text: str, reward: float) -> None:
    result = await graded(tmp_path, answer, text)
    assert result.reward == reward, result.details
    assert result.details["right"] == [answer]


async def test_each_of_several_right_answers_is_right(tmp_path: Path) -> None:
    assert (await graded(tmp_path, ["7", r"\sqrt{2}"], r"\boxed{2^{1/2}}")).reward == 1.0


async def test_an_answer_outside_of_a_box_may_be_none(tmp_path: Path) -> None:
    assert (await graded(tmp_path, "42", "The answer is 42.", only_boxed=True)).reward == 0.0
    assert (
        await graded(tmp_path, "42", r"Text \boxed{\text{no}} then \boxed{42} and 43.", only_boxed=True)
    ).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "tolerance", "reward"),
    [
        ("100", r"\boxed{101}", {"relative_tolerance": 0.02}, 1.0),
        ("100", r"\boxed{103}", {"relative_tolerance": 0.02}, 0.0),
        ("100", r"\boxed{100.4}", {"absolute_tolerance": 0.5}, 1.0),
        (r"\{1, 2\}", r"\boxed{\{2.01, 1\}}", {"absolute_tolerance": 0.1}, 1.0),
        (r"(0, 1)", r"\boxed{[0, 1]}", {"absolute_tolerance": 0.1}, 0.0),
        ("3.14", r"\boxed{\pi}", {"decimals": 2}, 1.0),
        ("3.14", r"\boxed{\pi}", {}, 0.0),
    ],
)
async def test_numbers_may_differ_as_much_as_the_task_says(
    tmp_path: Path, answer: str, text: str, tolerance: dict[str, Any], reward: float
) -> None:
    assert (await graded(tmp_path, answer, text, **tolerance)).reward == reward


async def test_letters_of_a_choice_are_answers(tmp_path: Path) -> None:
    choices = ["A", "B", "C", "D"]
    assert (await graded(tmp_path, "B", "The answer is B.", choices=choices)).reward == 1.0
    assert (await graded(tmp_path, "B", "The answer is C.", choices=choices)).reward == 0.0


async def test_a_session_without_an_answer_is_wrong(tmp_path: Path) -> None:
    result = await graded(tmp_path, "42", None)
    assert (result.reward, result.details["missing"]) == (0.0, "the model gave no answer")


async def test_the_answer_may_be_a_file(tmp_path: Path) -> None:
    evaluator = plugins.make_evaluator("math", {"answer": "42", "source": "file", "path": "answer.txt"})
    runtime = FolderRuntime(tmp_path / "runtime")
    runtime.file("answer.txt").write_text("$42$")
    assert (await evaluator.evaluate(a_context(runtime))).reward == 1.0


HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "a factorial": r"\boxed{99999999!}",
    "a sum without end": r"\boxed{\sum_{k=1}^{10^{12}} \frac{\sin(k^k)}{k!}}",
    "ten thousand braces": "\\boxed{" + "{" * 10_000,
    "deep brackets": "\\boxed{" + "(" * 3_000 + "1" + ")" * 3_000 + "}",
    "deep fractions": "\\boxed{" + "\\frac{1}{" * 900 + "1" + "}" * 900 + "}",
    "dollars": "$" * 50_000,
    "the word answer": "answer is " * 9_000,
    "a long number": "\\boxed{" + "9" * 90_000 + "}",
    "a code": r"\boxed{__import__('os').system('touch /tmp/gangline-math-was-here')}",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_answer_made_to_hurt_is_a_wrong_one(tmp_path: Path, name: str) -> None:
    started = time.monotonic()
    result = await graded(tmp_path, "42", HOSTILE[name], cpu_seconds=1, memory_bytes=512 << 20)
    assert result.reward == 0.0
    assert time.monotonic() - started < 60
    assert not Path("/tmp/gangline-math-was-here").exists()


async def test_a_right_answer_that_cannot_be_read_gives_no_reward(tmp_path: Path) -> None:
    with pytest.raises(EvaluatorError, match="cannot read the right answer 'none of these'"):
        await graded(tmp_path, "none of these", "none", choices=["A"])


async def test_a_machine_that_is_too_slow_makes_no_answer_wrong() -> None:
    with pytest.raises(EvaluatorError, match=r"not done in 0\.01 s"):
        await in_child("gangline.grading.math.comparing", {}, Limits(1, 1 << 30, 0.01))


def test_a_task_without_a_right_answer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="evaluator 'math': answer: Field required"):
        plugins.make_evaluator("math", {})


AGREES = """
import sys, types
import pytest
from gangline.grading.math.comparing import compare
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

sdist = sys.argv[1]
tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [f"{sdist}/tests"]


def ours(gold, pred, match_types=("latex", "expr"), precision=6, strict=True, allow_set_relation_comp=False):
    kinds = dict(latex=LatexExtractionConfig(boxed_match_priority=0), expr=ExprExtractionConfig())
    read = [parse(text, [kinds[one] for one in match_types], parsing_timeout=0) for text in (gold, pred)]
    return compare(*read, decimals=precision, strict=strict, sets_as_relations=allow_set_relation_comp)


class Ours:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            if hasattr(item.module, "compare_strings"):
                item.module.compare_strings = ours
            if item.module.__name__.endswith("test_yujianll"):
                item.module.verify = compare
        self.compared = [item for item in items if hasattr(item.module, "compare_strings")]

    def pytest_sessionfinish(self):
        print(f"\\ncompared {len(self.compared)}")


# Tests of its own timeouts and of its errors do not compare answers.
left_out = [f"--ignore={sdist}/tests/{name}" for name in ("test_timeout.py", "test_raise_on_error.py")]
args = ["-q", "-p", "no:cacheprovider", "--rootdir", sdist, f"{sdist}/tests", *left_out]
sys.exit(pytest.main(args, plugins=[Ours()]))
"""


def test_math_verifys_own_tests_pass_through_our_comparison(tmp_path: Path) -> None:
    """Its source distribution, which alone has its tests, is downloaded by `make .venv/.dev`."""
    packed = next((Path(sys.prefix) / "sdists").glob("math_verify-*.tar.gz"), None)
    if packed is None:
        pytest.skip("math-verify's source distribution is missing: make .venv/.dev")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (sdist,) = tmp_path.glob("math_verify-*")
    assert importlib.util.find_spec("math_verify") is not None
    run = subprocess.run(
        [sys.executable, "-c", AGREES, str(sdist)], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert int(run.stdout.rpartition("compared ")[2].split()[0]) > 250
