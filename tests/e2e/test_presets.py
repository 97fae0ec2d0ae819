"""Each preset, from its generated rows to their rewards: a scripted agent works in a sandbox without any network.

GANGLINE_PRESET_SAMPLES is the number of samples of each preset; `make test-presets` runs all 20, and 100 sessions of
one preset at once.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.conversation import Text, ToolResult
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.tasks.presets.preset import PRESETS, Preset, find_preset
from gangline.tasks.presets.samples.sample import Sample
from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import UpProcess

NUM = int(os.environ.get("GANGLINE_PRESET_SAMPLES", "2"))
KINDS = ("right", "wrong")
ALL = 20
AT_ONCE = 100


def mark(preset: str, number: int, kind: str) -> str:
    """A line of the instruction that tells the script which conversation it is."""
    return f"[{preset} {number} {kind}]"


def calls(name: str, sees: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """A reply with a tool call, and what its result shows."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}, sees


Turns = list[tuple[dict[str, Any], str]]


def math_turns(_sample: Sample, solution: str) -> Turns:
    return [
        calls("think", "", thought="I compute it, and check it a second time."),
        calls("python", "21", code="half = 21\nhalf"),
        calls("python", "42", code="half * 2"),
        ({"text": f"Both ways agree. The answer is \\boxed{{{solution}}}."}, ""),
    ]


def stem_turns(sample: Sample, solution: str) -> Turns:
    (source,) = sample.sources
    return [
        calls("web_search", re.escape(source), query=sample.row["problem"]),
        calls("fetch_page", r"Density at 20 degrees Celsius: \d", address=source),
        calls("python", "42", code="6 * 7"),
        calls("shell", "43", command="echo $((6 * 7 + 1))"),
        ({"text": f"The page says so. \\boxed{{{solution}}}"}, ""),
    ]


def code_turns(_sample: Sample, solution: str) -> Turns:
    return [
        calls("editor", "", command="create", path="/workspace/solution.py", file_text=solution),
        calls("shell", "compiled", command="python3 -m py_compile solution.py && echo compiled"),
        calls("python", str(len(solution)), code="len(open('solution.py').read())"),
        ({"text": "solution.py is written."}, ""),
    ]


def swe_turns(_sample: Sample, solution: str) -> Turns:
    return [
        calls(
            "shell",
            r"M \w+/\w+\.py",
            command=f"git apply - <<'END_OF_PATCH' && git status --short\n{solution}END_OF_PATCH",
        ),
        calls("editor", "python3 -m unittest", command="view", path="/testbed/README.md"),
        calls("submit", ""),
    ]


TURNS = {"math": math_turns, "stem": stem_turns, "code": code_turns, "swe": swe_turns}


def script() -> dict[str, Any]:
    return {"rules": list(rules()), "default": {"text": "I am lost."}}


def rules() -> Iterator[dict[str, Any]]:
    for preset in PRESETS:
        for number, sample in enumerate(preset.samples(NUM)):
            for kind in KINDS:
                which = {"where": "any", "pattern": re.escape(mark(preset.name, number, kind))}
                turns = TURNS[preset.name](sample, getattr(sample, kind))
                yield from (reply | which | {"turn": turn} for turn, (reply, _) in enumerate(turns))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    service = UpProcess(tmp_path_factory.mktemp("up"), script=script())
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def named(name: str) -> Preset:
    found = find_preset(name)
    assert found is not None
    return found


async def graded(up: UpProcess, preset: Preset, kind: str, num_samples: int = 1) -> list[SessionResult]:
    """The sessions of all samples, at once. num_samples: sessions of each."""
    running = up.running()
    bodies = [preset.task(sample.row) | {"num_samples": num_samples} for sample in preset.samples(NUM)]
    for number, body in enumerate(bodies):
        body["instruction"] += f"\n\n{mark(preset.name, number, kind)}"
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        submitted = await client.submit_many(bodies)
        found: list[SessionResult] = []
        for task in submitted:
            await client.wait(task.task_id, timeout_s=240 * num_samples)
            found += await client.result(task.task_id)
    return found


def observations(result: SessionResult) -> list[str]:
    """Results of the tool calls, as the model saw them."""
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    pieces = [piece for message in trace.response_messages for piece in message.parts if isinstance(piece, ToolResult)]
    return ["".join(part.text for part in piece.content if isinstance(part, Text)) for piece in pieces]


@pytest.mark.parametrize("name", [one.name for one in PRESETS])
async def test_right_solutions_earn_one_and_wrong_ones_nothing(up: UpProcess, name: str) -> None:
    preset = named(name)
    for kind, reward in zip(KINDS, (1.0, 0.0), strict=True):
        for sample, result in zip(preset.samples(NUM), await graded(up, preset, kind), strict=True):
            assert (result.outcome, result.failure) == ("completed", None), result.failure
            assert result.reward == reward, result.reward_details
            turns = TURNS[name](sample, getattr(sample, kind))
            assert len(result.completions) == len(turns)
            for shown, (_, sees) in zip(observations(result), turns, strict=False):
                assert re.search(sees, shown), shown
            assert result.trajectory is not None
            assert audit(result.trajectory, result.completions).ok


@pytest.mark.skipif(NUM < ALL, reason="does not apply: a part of make test-presets")
@pytest.mark.timeout(1800)
async def test_a_hundred_code_sessions_at_once_on_two_cores_need_no_second_attempt(tmp_path: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    names = ("--run-slots", "--ready-slots", "--init-workers", "--postrun-workers")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        service = UpProcess(tmp_path, *(part for name in names for part in (name, AT_ONCE)), script=script())
    finally:
        os.sched_setaffinity(0, cores)
    try:
        assert service.ready(), "the service did not start"
        results = await graded(service, named("code"), "right", AT_ONCE // ALL)
    finally:
        service.close()
    assert len(results) == AT_ONCE
    ends = Counter((result.outcome, result.reward, result.attempt) for result in results)
    assert ends == {("completed", 1.0, 1): AT_ONCE}, [result.failure for result in results if result.failure][:3]


async def test_a_trainer_posts_a_row_to_a_fresh_install(up: UpProcess) -> None:
    (sample,) = named("math").samples(1)
    instance = sample.row | {"data_source": "math", "problem": f"{sample.row['problem']}\n{mark('math', 0, 'right')}"}
    running = up.running()
    headers = {"Authorization": f"Bearer {running['control_token']}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        job = {"instance": instance, "sampling_params": {"max_tokens": 256}}
        async with http.post(f"{running['server_url']}/process", json=job) as reply:
            answer = await reply.json(content_type=None)
    assert (reply.status, answer.get("resolved"), answer.get("reward")) == (200, True, 1.0), answer
