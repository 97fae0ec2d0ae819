"""Tasks for the bench of `gangline vet`: sound ones of seven families, and the same with one defect each.

Everything follows from a seed. Each family makes a task with its reference solution; each defect changes one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from gangline.tasks.presets.preset import PRESETS

Task = dict[str, Any]

AGENT = {"harness": "shell", "settings": {"command": "true"}}
WORDS = ("sled", "harbor", "ledger", "kettle", "lantern", "paddle", "gravel", "anchor", "barrel", "copper", "meadow")
NUM_OF_PRESET = 15
NUM_OF_DEFECT = 10


def _task(instruction: str, evaluator: Task, solution: Task, files: dict[str, str] | None = None) -> Task:
    prepare = [{"type": "write", "path": path, "content": text} for path, text in (files or {}).items()]
    return {
        "instruction": instruction,
        "agent": AGENT,
        "runtime": {"network": "none", "prepare": prepare},
        "timeout_seconds": 120,
        "evaluator": evaluator,
        "solution": solution,
    }


def _script(command: str, files: dict[str, str] | None = None) -> Task:
    return {"strategy": "script", "config": {"command": command, "files": files or {}}}


def _paid_if(condition: str) -> str:
    return f"if {condition}; then echo 1; else echo 0; fi > reward.txt"


def _text(rng: random.Random) -> str:
    return "".join(
        f"{' '.join(rng.choice(WORDS) for _ in range(rng.randint(3, 6)))}\n" for _ in range(rng.randint(4, 9))
    )


# -- families ------------------------------------------------------------------------------------------------------


def capitals(rng: random.Random) -> Task:
    text, wanted = _text(rng), ".gangline/wanted"
    return _task(
        f"Write the text of `words.txt` in capital letters to `upper.txt` (order {rng.randint(0, 10**6)}).",
        _script(_paid_if(f"[ ! -L upper.txt ] && cmp -s upper.txt {wanted}"), {wanted: text.upper()}),
        {"command": "tr a-z A-Z < words.txt > upper.txt"},
        {"words.txt": text},
    )


def counts(rng: random.Random) -> Task:
    text = _text(rng)
    wanted = {word: text.split().count(word) for word in sorted(set(text.split()))}
    check = (
        "import json\ntry:\n    found = json.load(open('counts.json'))\n"
        "except (OSError, ValueError):\n    found = None\n"
        f"open('reward.txt', 'w').write(str(int(found == {wanted!r})))\n"
    )
    return _task(
        "Count the words of `words.txt`, and write a JSON object of words and their numbers to `counts.json`.",
        _script("python3 -I check_counts.py", {"check_counts.py": check}),
        {
            "command": "python3 -c \"import json, collections; words = open('words.txt').read().split(); "
            "json.dump(collections.Counter(words), open('counts.json', 'w'))\""
        },
        {"words.txt": text},
    )


def function(rng: random.Random) -> Task:
    step, start = rng.randint(2, 9), rng.randint(1, 50)
    solution = (
        f"def next_stop(number):\n    if number < {start}:\n        return {start}\n"
        f"    return number + {step} - (number - {start}) % {step}\n"
    )
    cases = [(at, start if at < start else at + step - (at - start) % step) for at in rng.sample(range(200), 6)]
    tests = "".join(f"    def test_{at}(self):\n        self.assertEqual(next_stop({one}), {other})\n\n"
                    for at, (one, other) in enumerate([(start - 1, start), *cases]))  # fmt: skip
    text = (
        "import sys, unittest\nsys.path.insert(0, '.')\nfrom stops import next_stop\n\n\n"
        "class StopsTest(unittest.TestCase):\n"
        f"{tests}\nif __name__ == '__main__':\n    unittest.main(verbosity=2)\n"
    )
    return _task(
        f"A train stops at kilometre {start} and then each {step} kilometres. Write a Python function "
        "`next_stop(number)` to `stops.py`: the first stop behind a whole number of kilometres, or the first "
        "one at all before it.",
        _script(_paid_if("python3 -I test_hidden_stops.py"), {"test_hidden_stops.py": text}),
        {"files": {"stops.py": solution}},
    )


def table(rng: random.Random) -> Task:
    rows = [(rng.choice(WORDS), rng.randint(1, 900)) for _ in range(rng.randint(5, 12))]
    text = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
    total = sum(amount for _, amount in rows)
    return _task(
        "Write the sum of the column `amount` of `sales.csv` to `total.txt`.",
        _script(_paid_if(f'[ "$(cat total.txt 2>/dev/null)" = {total} ]')),
        {"command": "awk -F, 'NR > 1 { total += $2 } END { print total }' sales.csv > total.txt"},
        {"sales.csv": text},
    )


def sums(rng: random.Random) -> Task:
    one, other = rng.randint(100, 999), rng.randint(1100, 9999)
    checks = [{"kind": "equals", "value": str(one * other)}]
    config = {"checks": checks, "part": "last_line"}
    return _task(
        f"Multiply {one} by {other}. Print the product alone.",
        {"strategy": "test_on_output", "config": config},
        {"answer": f"{one * other}\n"},
    )


def program(rng: random.Random) -> Task:
    factor, shift = rng.randint(2, 30), rng.randint(1, 99)
    cases = [
        {"input": f"{number}\n", "output": f"{factor * number + shift}\n"} for number in rng.sample(range(1000), 4)
    ]
    return _task(
        f"Write a program to solution.py that reads a whole number, multiplies it by {factor}, adds {shift} and prints "
        "the result.",
        {"strategy": "cases", "refresh_runtime": True, "config": {"cases": cases}},
        {"files": {"solution.py": f"print(int(input()) * {factor} + {shift})\n"}},
    )


def records(rng: random.Random) -> Task:
    people = [{"name": rng.choice(WORDS), "age": rng.randint(18, 90)} for _ in range(rng.randint(4, 9))]
    oldest, total = max(one["age"] for one in people), sum(one["age"] for one in people)
    check = (
        "import json\ntry:\n    found = json.load(open('report.json'))\nexcept (OSError, ValueError):\n    found = {}\n"
        f"passed = [found.get('oldest') == {oldest}, found.get('total') == {total}]\n"
        "json.dump({'reward': sum(passed) / 2, 'passed': sum(passed)}, open('reward.json', 'w'))\n"
    )
    return _task(
        "From `people.json`, write `report.json` with the age of the oldest person, `oldest`, and the sum of all ages, "
        "`total`.",
        _script("python3 -I check_report.py", {"check_report.py": check}),
        {
            "command": "python3 -c \"import json; ages = [one['age'] for one in json.load(open('people.json'))]; "
            "json.dump({'oldest': max(ages), 'total': sum(ages)}, open('report.json', 'w'))\""
        },
        {"people.json": json.dumps(people)},
    )


FAMILIES = (capitals, counts, function, table, sums, program, records)


# -- defects -------------------------------------------------------------------------------------------------------


def _with(task: Task, command: str | None = None, files: dict[str, str] | None = None, **runtime: Any) -> Task:
    """Another command of the grader, more hidden files, another runtime."""
    config = {**task["evaluator"]["config"]}
    if command is not None:
        config["command"] = command
    config["files"] = {**config.get("files", {}), **(files or {})}
    evaluator = {**task["evaluator"], "config": config}
    return {**task, "evaluator": evaluator, "runtime": {**task["runtime"], **runtime}}


def _graded_then(task: Task, after: str) -> Task:
    return _with(task, f"{task['evaluator']['config']['command']}\n{after}")


def _any(rng: random.Random) -> Task:
    return rng.choice((capitals, counts, table, records))(rng)


def always_pays(rng: random.Random) -> Task:
    return _graded_then(_any(rng), "rm -f reward.json; echo 1 > reward.txt")


def all_skipped(rng: random.Random) -> Task:
    task = function(rng)
    (text,) = task["evaluator"]["config"]["files"].values()
    text = text.replace("from stops import next_stop\n", "").replace(
        "class Stops", "@unittest.skip('later')\nclass Stops"
    )
    return _with(task, files={"test_hidden_stops.py": text})


def flaky(rng: random.Random) -> Task:
    task = _any(rng)
    return _graded_then(task, "rm -f reward.json.old; [ $(($(od -An -N1 -tu1 /dev/urandom) % 2)) = 0 ] && rm -f "
                              "reward.json && echo 0 > reward.txt; true")  # fmt: skip


def wrong_solution(rng: random.Random) -> Task:
    return {**capitals(rng), "solution": {"command": "tr a-y A-Y < words.txt | tr -d A > upper.txt"}}


def trusts_reports(rng: random.Random) -> Task:
    return _graded_then(_any(rng), "if grep -qs PASS result.txt; then rm -f reward.json; echo 1 > reward.txt; fi")


def imports_from_workdir(rng: random.Random) -> Task:
    task = function(rng)
    return _with(task, _paid_if("PYTHONPATH=. python3 test_hidden_stops.py"))


def links(rng: random.Random) -> Task:
    task = capitals(rng)
    (wanted,) = task["evaluator"]["config"]["files"].values()
    return _with(task, _paid_if("cmp -s upper.txt expected.txt"), {"expected.txt": wanted})


def in_history(rng: random.Random) -> Task:
    task = function(rng)
    (path, text), *_ = task["solution"]["files"].items()
    commit = "git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m"
    prepare = [
        {"type": "write", "path": path, "content": text},
        {
            "type": "exec",
            "command": f"git init -q . && git add . && {commit} done && git rm -q {path} && {commit} begin",
        },
    ]
    return {**task, "runtime": {**task["runtime"], "prepare": prepare}}


def in_environment(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        task = sums(rng)
        return {**task, "runtime": {**task["runtime"], "env": {"EXPECTED": task["solution"]["answer"].strip()}}}
    task = capitals(rng)
    (wanted,) = task["evaluator"]["config"]["files"].values()
    return {**task, "runtime": {**task["runtime"], "env": {"GRADER_OUTPUT": wanted}}}


def visible_tests(rng: random.Random) -> Task:
    task = function(rng)
    (text,) = task["evaluator"]["config"]["files"].values()
    prepare = [{"type": "write", "path": "tests/test_stops.py", "content": text}]
    return {**task, "runtime": {**task["runtime"], "prepare": prepare}}


def clock(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        check = "import datetime, os\nif datetime.date.today().year > 2026:\n    os.remove('reward.json') if "
        check += "os.path.exists('reward.json') else None\n    open('reward.txt', 'w').write('0')\n"
        return _with(_graded_then(_any(rng), "python3 later.py"), files={"later.py": check})
    return _graded_then(_any(rng), '[ "$(date +%Y)" -le 2026 ] || { rm -f reward.json; echo 0 > reward.txt; }')


def earlier_runs(rng: random.Random) -> Task:
    return _graded_then(_any(rng), "mkdir .graded 2>/dev/null || { rm -f reward.json; echo 0 > reward.txt; }")


def order(rng: random.Random) -> Task:
    task = function(rng)
    (text,) = task["evaluator"]["config"]["files"].values()
    text = text.replace(
        "class StopsTest(unittest.TestCase):\n",
        "SEEN = []\n\n\nclass StopsTest(unittest.TestCase):\n    def test_00_begin(self):\n        SEEN.append(1)\n\n"
        "    def test_99_end(self):\n        self.assertEqual(SEEN, [1])\n\n",
    )
    return _with(task, _paid_if("python3 test_hidden_stops.py"), {"test_hidden_stops.py": text})


def network(rng: random.Random) -> Task:
    needs = "grep -Eq '^ *(e|w|v)[a-z0-9]+:' /proc/net/dev || { rm -f reward.json; echo 0 > reward.txt; }"
    return _with(_graded_then(_any(rng), needs), network="full")


def existence_only(rng: random.Random) -> Task:
    task = capitals(rng)
    return _with(task, _paid_if(rng.choice(("[ -e upper.txt ]", "[ -s upper.txt ]", "[ $(wc -l < upper.txt) -gt 3 ]"))))


def wording(rng: random.Random) -> Task:
    task = function(rng)
    line = next(iter(task["solution"]["files"].values())).splitlines()[-1].strip()
    return _with(task, _paid_if(f"python3 -I test_hidden_stops.py && grep -qF '{line}' stops.py"))


def over_budget(rng: random.Random) -> Task:
    task = _any(rng)
    return {**task, "timeout_seconds": 2.0, "solution": {"command": f"sleep 3; {task['solution']['command']}"}}


def missing_file(rng: random.Random) -> Task:
    task = _any(rng)
    name = f"`notes/{rng.choice(WORDS)}.md`"
    return {**task, "instruction": f"{task['instruction']} The rules in {name} apply."}


def contained_answer(rng: random.Random) -> Task:
    product = rng.randint(2, 30) * rng.randint(2, 30)
    config = {"checks": [{"kind": "contains", "value": str(product)}]}
    evaluator = {"strategy": "test_on_output", "config": config}
    return {**sums(rng), "evaluator": evaluator, "solution": {"answer": str(product)}}


def shown_cases(rng: random.Random) -> Task:
    task = program(rng)
    shown = "; ".join(f"{one['input'].strip()} gives {one['output'].strip()}"
                      for one in task["evaluator"]["config"]["cases"])  # fmt: skip
    return {**task, "instruction": f"{task['instruction']} Examples: {shown}."}


DEFECTS: tuple[Callable[[random.Random], Task], ...] = (
    always_pays,
    all_skipped,
    flaky,
    wrong_solution,
    trusts_reports,
    imports_from_workdir,
    links,
    in_history,
    in_environment,
    visible_tests,
    clock,
    earlier_runs,
    order,
    network,
    existence_only,
    wording,
    over_budget,
    missing_file,
    contained_answer,
    shown_cases,
)


def sound_tasks(seed: int = 0) -> Iterator[Task]:
    """200: samples of the presets, and 20 of each family."""
    for preset in PRESETS:
        for at, sample in enumerate(preset.samples(NUM_OF_PRESET, seed)):
            yield preset.solved(sample) | {"task_id": f"sound-{preset.name}-{at:02d}"}
    for family in FAMILIES:
        for at in range(20):
            yield family(random.Random(f"{seed}.{family.__name__}.{at}")) | {
                "task_id": f"sound-{family.__name__}-{at:02d}"
            }


def defective_tasks(seed: int = 0) -> Iterator[Task]:
    """200: 10 of each of 20 kinds."""
    for defect in DEFECTS:
        for at in range(NUM_OF_DEFECT):
            task = defect(random.Random(f"{seed}.{defect.__name__}.{at}"))
            yield task | {"task_id": f"defect-{defect.__name__}-{at:02d}"}
