"""`gangline vet` through a real service: samples that we ship are sound, and defects are found, each by its check.

GANGLINE_PRESET_SAMPLES is the number of samples of each preset; `make test-presets` runs all 20.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.tasks.presets.preset import PRESETS
from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import COMMAND, UpProcess, clean_environment, gangline, wait_for

NUM = int(os.environ.get("GANGLINE_PRESET_SAMPLES", "1"))
AGENT = {"harness": "shell", "settings": {"command": "true"}}
RIGHT = "tr a-z A-Z < words.txt > upper.txt"
CHECK = 'if [ "$(cat upper.txt 2>/dev/null)" = "RED SLED" ]; then echo 1; else echo 0; fi > reward.txt'


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    service = UpProcess(tmp_path_factory.mktemp("up"))
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def task(name: str, *, check: str = CHECK, solution: str | dict[str, str] = RIGHT, **changes: Any) -> dict[str, Any]:
    """Write a word in capital letters; a script decides."""
    runtime = {"network": "none", "prepare": [{"type": "write", "path": "words.txt", "content": "red sled\n"}]}
    config = {"command": check, "files": changes.pop("files", {})}
    return {
        "task_id": name.replace("+", "-"),
        "instruction": changes.pop("instruction", "Write the text of `words.txt` in capital letters to `upper.txt`."),
        "agent": AGENT,
        "runtime": runtime | changes.pop("runtime", {}),
        "evaluator": {"strategy": "script", "config": config},
        "solution": {"command": solution} if isinstance(solution, str) else solution,
        **changes,
    }


def steps(name: str, second_check: str = CHECK.replace("upper.txt", "again.txt")) -> dict[str, Any]:
    """The same, and then a copy of it: a step each. The second one's solution needs the first one's."""
    whole = task(name, instruction="In two steps.")
    run = {field: whole.pop(field) for field in ("evaluator", "solution")} | {"min_reward": 1}
    copied = {"evaluator": {"strategy": "script", "config": {"command": second_check}}}
    copied |= {"solution": {"command": 'cp upper.txt "$COPY"', "env": {"COPY": "again.txt"}}}
    first = {"name": "write", "instruction": "Write the text of `words.txt` in capital letters to `upper.txt`.", **run}
    return {**whole, "steps": [first, {"name": "copy", "instruction": "Copy it to `again.txt`.", **copied}]}


DEFECTIVE = {
    "floor": {"check": "echo 1 > reward.txt"},
    "cheats+leaks+files+mutants": {
        "check": "if [ -s upper.txt ]; then echo 1; else echo 0; fi > reward.txt",
        "runtime": {"env": {"RESULT": "RED SLED"}},
        "instruction": "Write the text of `input/words.csv` in capital letters to `upper.txt`.",
    },
    "conditions": {"check": f'{CHECK}; [ "$(date +%Y)" -lt 2027 ] || echo 0 > reward.txt'},
}
"""Checks -> changes to the task that they find."""
PAYS_FOR_STEP_ONE = "if [ -s upper.txt ]; then echo 1; else echo 0; fi > reward.txt"
"""A step's grader that pays a second time for the step before."""


def tasks() -> list[dict[str, Any]]:
    shipped = [
        preset.solved(sample) | {"task_id": f"{preset.name}-{at}"}
        for preset in PRESETS
        if NUM > 1 or preset.name != "stem"  # graded as `math` is
        for at, sample in enumerate(preset.samples(NUM))
    ]
    unproven = {name: value for name, value in task("unproven").items() if name != "solution"}
    defective = [task(name, **changes) for name, changes in DEFECTIVE.items()]
    return [
        task("sound"),
        steps("sound-steps"),
        *shipped,
        unproven,
        *defective,
        steps("steps-floor", PAYS_FOR_STEP_ONE),
    ]


def vetted(up: UpProcess, path: Path, *more: object) -> dict[str, Any]:
    done = gangline("vet", path, "--runs", 2, "--data", up.data, "--json", *more, timeout_s=240 * NUM)
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def written(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


@pytest.mark.timeout(300 * NUM)
async def test_what_is_sound_passes_and_each_defect_fails_its_check(up: UpProcess, tmp_path: Path) -> None:
    page, out = tmp_path / "report.html", tmp_path / "vetted.jsonl"
    found = vetted(up, written(tmp_path / "tasks.jsonl", tasks()), "--html", page, "--out", out)
    records = {one["name"].replace("-", "+"): one for one in found["tasks"]}
    failed = {
        name: {check for check, one in record["checks"].items() if one["status"] == "failed"}
        for name, record in records.items()
    }
    in_a_step = failed.pop("steps+floor")
    sound = failed.keys() - DEFECTIVE.keys()
    assert not any(failed[name] for name in sound), {name: records[name]["checks"] for name in sound if failed[name]}
    assert {name for name, one in records.items() if one["verdict"] == "unproven"} == {"unproven"}
    missed = {name: failed[name] for name in DEFECTIVE if not set(name.split("+")) <= failed[name]}
    assert missed == {}
    assert in_a_step == {"floor"}
    told = records["steps+floor"]["checks"]["floor"]["message"]
    assert told == "step 'copy': doing nothing earns reward 1 instead of 0"
    assert "defective" in page.read_text()
    assert "<script" not in page.read_text()
    await rewards_have_the_verdict(up, {one["task_id"]: one for one in map(json.loads, out.read_text().splitlines())})


async def rewards_have_the_verdict(up: UpProcess, stored: dict[str, dict[str, Any]]) -> None:
    """A task that was changed after its audit has none."""
    agent = {"agent": AGENT | {"allow_no_model_call": True}}
    sound, changed = stored["sound"] | agent, stored["sound"] | agent | {"instruction": "Another one."}
    told = []
    async with ServerClient(up.running()["server_url"], up.running()["control_token"]) as client:
        for number, body in enumerate((sound, changed, stored["floor"] | agent)):
            submitted = await client.submit(body | {"task_id": f"again-{number}"})
            await client.wait(submitted.task_id, timeout_s=120)
            (result,) = await client.result(submitted.task_id)
            told.append(result.reward_details["vetting"]["verdict"])
    assert told == ["sound", "stale", "defective"]


def test_killed_it_continues_and_a_task_of_the_held_out_set_is_found(up: UpProcess, tmp_path: Path) -> None:
    evaluator = {"strategy": "test_on_output", "config": {"checks": [{"kind": "equals", "value": "sledding"}]}}
    some = [
        task(f"t{at}", evaluator=evaluator, solution={"answer": "sledding"}, instruction=f"Say it, {at}.")
        for at in range(2)
    ]
    path = written(tmp_path / "some.jsonl", some)
    held_out = written(tmp_path / "held.jsonl", [task("t1")])
    command = ("vet", path, "--runs", 2, "--in-flight", 1, "--data", up.data, "--json", "--held-out", held_out)
    running = subprocess.Popen(
        [*COMMAND, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    )
    kept = up.data / "vetting" / "some" / "audits.jsonl"
    wait_for(lambda: kept.exists() and kept.read_bytes().count(b"\n") == 1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, b"Stopped" in errors) == (130, True), errors
    before = kept.read_bytes()
    found = vetted(up, path, "--in-flight", 1, "--held-out", held_out)
    assert kept.read_bytes().startswith(before), "the first task was audited again"
    assert [one["verdict"] for one in found["tasks"]] == ["sound", "defective"]
    assert found["failed_checks"] == {"held_out": 1}
