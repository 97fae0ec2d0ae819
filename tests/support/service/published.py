"""A small copy of each benchmark of the catalogue, in the form in which it is published: files, columns, types.

The rows are made here; the forms are those of the revisions in the catalogue.
"""

from __future__ import annotations

import base64
import csv
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from support.service.field_tasks import NEW_TESTS, harbor_task
from support.service.swe_rows import family_row

TEXT, TEXTS, NUMBER = pa.string(), pa.list_(pa.string()), pa.int64()


class Copy(NamedTuple):
    """What an agent hands in: the last message, or the text of `solution.py`."""

    right: str
    wrong: tuple[str, ...]


def parquet(path: Path, types: dict[str, pa.DataType], *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(list(types.items()))
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), path)


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gsm8k(root: Path) -> Copy:
    types = {"question": TEXT, "answer": TEXT}
    row = {"question": "A sled has 4 dogs. 3 sleds?", "answer": "4 dogs on each: 3*4=<<3*4=12>>12 dogs.\n#### 1,200"}
    parquet(root / "main" / "test-00000-of-00001.parquet", types, row)
    parquet(root / "socratic" / "test-00000-of-00001.parquet", types, row, row)
    return Copy(r"So there are \boxed{1200}.", (r"\boxed{12}", "1200", r"\boxed{1200} or \boxed{1201}"))


def math_500(root: Path) -> Copy:
    row = {
        "problem": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.",
        "solution": r"We have $r = 3$, so \[\boxed{\left( 3, \frac{\pi}{2} \right)}.\]",
        "answer": r"\left( 3, \frac{\pi}{2} \right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    }
    lines(root / "test.jsonl", row)
    return Copy(r"It is \boxed{(3, \pi/2)}", (r"\boxed{(3, \pi)}", r"\boxed{3}"))


def aime_2024(root: Path) -> Copy:
    types = {"id": NUMBER, "problem": TEXT, "solution": TEXT, "answer": TEXT, "url": TEXT, "year": TEXT}
    row = {"id": 60, "problem": "Find $n$.", "solution": "...", "answer": "025", "url": "https://x.org", "year": "2024"}
    parquet(root / "data" / "train-00000-of-00001.parquet", types, row)
    return Copy(r"\boxed{25}", (r"\boxed{250}",))


def aime_2025(root: Path) -> Copy:
    lines(root / "test.jsonl", {"problem": "Find the sum of all $b>9$.", "answer": "70", "id": "0"})
    return Copy(r"\boxed{070}", (r"\boxed{71}",))


def humaneval(root: Path) -> Copy:
    types = dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), TEXT)
    prompt = (
        "from typing import List\n\n\ndef whole(values: List[float]) -> List[int]:\n"
        '    """ Round each.\n    >>> whole([1.2])\n    [1]\n    """\n'
    )
    test = (
        "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.2, 3.6]) == [1, 4]\n    assert candidate([]) == []\n"
    )
    right = "    return [round(value) for value in values]\n"
    row = {"task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": right, "test": test}
    parquet(root / "openai_humaneval" / "test-00000-of-00001.parquet", types, {**row, "entry_point": "whole"})
    return Copy(prompt + right, (f"{prompt}    return [1, 4]\n", "", *CHEATS))


def mbpp(root: Path) -> Copy:
    types = {"source_file": TEXT, "task_id": pa.int32(), "prompt": TEXT, "code": TEXT}
    row = {
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "task_id": 11,
        "prompt": "Write a python function to find the root.",
        "code": "import math\r\ndef whole(values):\r\n  return math.sqrt(values)",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(whole(4), 2.0)", "assert math.isclose(whole(9), 3.0)"],
    }
    path = root / "sanitized" / "test-00000-of-00001.parquet"
    parquet(path, {**types, "test_imports": TEXTS, "test_list": TEXTS}, row)
    return Copy("def whole(values):\n    return values ** 0.5\n", ("def whole(values): return 2.0\n", *CHEATS))


CHEATS = (
    "import os\nos._exit(0)\n",
    "raise SystemExit(0)\n",
    "def whole(values): exit()\n",
    "import sys\nprint('passed')\nsys.stdout.flush()\nimport os, signal\nos.kill(os.getpid(), 9)\n",
    "open('reward.json', 'w').write('{\"reward\": 1}')\n",
    "def whole(values):\n",
    "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'passed')\n  except OSError: pass\n",
)
"""Programs that fail tests of `whole`, and would rather not."""


def livecodebench(root: Path) -> Copy:
    tests = [{"input": "4\n", "output": "2.0\nyes\n", "testtype": "stdin"}]
    hidden = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{**tests[0], "input": "9\n"}])))).decode()
    row = {
        "question_title": "A. Root",
        "question_content": "Print the root, or 2 where it is more, and yes.",
        "platform": "atcoder",
        "question_id": "abc387_a",
        "contest_id": "abc387",
        "contest_date": "2025-01-04T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests),
        "private_test_cases": hidden,
        "metadata": "{}",
    }
    call = {"input": "[1, 2]\n1", "output": "[[2, true]]", "testtype": "functional"}
    method = {
        **row,
        "platform": "leetcode",
        "question_id": "3702",
        "starter_code": "class Solution:\n    def merge(self, values: List[int], at: int) -> List[Any]:\n        ",
        "public_test_cases": json.dumps([call]),
        "private_test_cases": "[]",
        "metadata": json.dumps({"func_name": "merge"}),
    }
    lines(root / "test6.jsonl", row, method)
    return Copy("print(min(sqrt(int(input())), 2))\nprint('yes ')\n", ("print(2, 'yes')\n", "print(2)\n", "1/0\n"))


METHOD = Copy(
    "class Solution:\n    def merge(self, values: List[int], at: int):\n        return [[values[at], True]]\n",
    ("class Solution:\n    def merge(self, values, at): return [[2, False]]\n", "def merge(a, b): return [[2]]\n"),
)
"""Of LiveCodeBench's second row, which calls a method and gives no import for `List`."""


def gpqa_diamond(root: Path) -> Copy:
    row = {
        "Pre-Revision Question": "?",
        "Question": "How many of 2, 3, 5 and 7 are odd?\n",
        "Correct Answer": "3\n",
        "Incorrect Answer 1": "2",
        "Incorrect Answer 2": "5",
        "Incorrect Answer 3": "7",
        "Explanation": "2 is even.",
        "Record ID": "rec0",
        "High-level domain": "Physics",
    }
    root.mkdir(parents=True)
    with (root / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    return Copy("By counting,\n3", ("2", "5", "7", "", "It is 3 or 2."))


def mmlu_pro(root: Path) -> Copy:
    types = {"question_id": NUMBER, "question": TEXT, "options": TEXTS, "answer": TEXT, "answer_index": NUMBER}
    row = {"question_id": 70, "question": "Which is a dog?", "options": ["N/A", "C", "Husky"], "answer": "C"}
    more = {"answer_index": 2, "cot_content": "", "category": "biology", "src": "made"}
    path = root / "data" / "test-00000-of-00001.parquet"
    parquet(path, types | dict.fromkeys(("cot_content", "category", "src"), TEXT), row | more)
    return Copy("A husky.\nC", ("A", "B", "D"))


def arc_challenge(root: Path) -> Copy:
    choices = pa.struct({"text": TEXTS, "label": TEXTS})
    types = {"id": TEXT, "question": TEXT, "choices": choices, "answerKey": TEXT}
    row = {
        "id": "Mercury_7175875",
        "question": "What pulls a sled?",
        "choices": {"text": ["Dogs", "Snow", "Ice", "A rope"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    }
    parquet(root / "ARC-Challenge" / "test-00000-of-00001.parquet", types, row)
    parquet(root / "ARC-Easy" / "test-00000-of-00001.parquet", types, row, row)
    return Copy("(A) Dogs", ("B", "Snow"))


TESTS = "python -m pytest -rA -p no:cacheprovider test_kennel.py"


def swe_of_5(root: Path, issue: dict[str, Any]) -> None:
    """SWE-bench's rows since its version 5."""
    patch = f"git apply -v - <<'EOF_114329324912'\n{issue['test_patch']}EOF_114329324912"
    more = {
        "hints_text": "",
        "created_at": "2022-03-03T15:14:54Z",
        "environment_setup_commit": issue["base_commit"],
        "image": "swebench/sweb.eval.x86_64.dogs_1776_kennel-1:latest",
        "eval_script": f"{patch}\n: '>>>>> Start Test Output'\n{TESTS}\n: '>>>>> End Test Output'\n",
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
    }
    row = issue | more
    parquet(root / "data" / "test-00000-of-00001.parquet", dict.fromkeys(row, TEXT), row)


def swe_like(family: str, types: dict[str, pa.DataType]) -> Callable[[Path, dict[str, Any]], None]:
    def made(root: Path, issue: dict[str, Any]) -> None:
        row = family_row(family, issue, NEW_TESTS)
        path = root / "data" / "train-00000-of-00001.parquet"
        parquet(path, dict.fromkeys(row, TEXT) | types, row)

    return made


def terminal_bench_2(root: Path) -> None:
    toml = "version = '1.0'\n[metadata]\n[environment]\ndocker_image = 'alexgshaw/count-bytes:20251031'\n"
    harbor_task(root / "count-bytes", toml + "[verifier]\ntimeout_sec = 900.0\n[agent]\ntimeout_sec = 900.0\n")
    (root / "README.md").write_text("# Terminal-Bench 2\n")


_LISTS = {"FAIL_TO_PASS": TEXTS, "PASS_TO_PASS": TEXTS}
ANSWERED: dict[str, Callable[[Path], Copy]] = {
    "gsm8k": gsm8k,
    "math-500": math_500,
    "aime-2024": aime_2024,
    "aime-2025": aime_2025,
    "humaneval": humaneval,
    "mbpp": mbpp,
    "livecodebench": livecodebench,
    "gpqa-diamond": gpqa_diamond,
    "mmlu-pro": mmlu_pro,
    "arc-challenge": arc_challenge,
}
PATCHED: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    **dict.fromkeys(("swe-bench-verified", "swe-bench-lite", "swe-bench-multilingual"), swe_of_5),
    "swe-gym": swe_like("swe-gym", _LISTS),
    "swe-smith": swe_like("swe-smith", _LISTS),
    "r2e-gym": swe_like("r2e-gym", {}),
}
"""From the row of an issue, as `field_tasks.repository` makes it."""
