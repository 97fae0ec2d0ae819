import json
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context, a_trace, said


@pytest.fixture
def agents(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "agents")


@pytest.fixture
def clean(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "clean")


async def graded(runtime: FolderRuntime, fresh: FolderRuntime | None, command: str, **config: Any) -> Reward:
    evaluator = plugins.make_evaluator("script", {"command": command, **config})
    return await evaluator.evaluate(a_context(runtime, fresh=fresh))


@pytest.mark.parametrize(
    ("command", "reward", "details"),
    [
        ("echo 0.5 > reward.txt", 0.5, {}),
        ("echo -1e-3 > reward.json", -0.001, {}),
        ("""echo '{"reward": 1, "tests": 3}' > reward.json""", 1.0, {"tests": 3}),
        ("echo 1 > reward.json; echo 0 > reward.txt", 1.0, {}),
    ],
)
async def test_the_commands_number_is_the_reward(
    agents: FolderRuntime, clean: FolderRuntime, command: str, reward: float, details: dict[str, Any]
) -> None:
    result = await graded(agents, clean, command)
    assert result.reward == reward
    assert result.details == details | {"graded_in": "clean runtime"}


async def test_the_command_may_reward_traces_and_score_turns(agents: FolderRuntime, clean: FolderRuntime) -> None:
    given = {"reward": 1, "trace_rewards": {"t0": 0.5}, "turn_scores": {"k0": -1, "k1": 2}, "note": "x"}
    result = await graded(agents, clean, f"echo '{json.dumps(given)}' > reward.json")
    assert (result.reward, result.trace_rewards, result.turn_scores) == (1.0, {"t0": 0.5}, {"k0": -1.0, "k1": 2.0})
    assert result.details == {"note": "x", "graded_in": "clean runtime"}


@pytest.mark.parametrize("given", ["[1]", '{"t0": "x"}', '{"t0": true}', '{"t0": NaN}', "1"])
async def test_rewards_of_traces_are_finite_numbers(agents: FolderRuntime, clean: FolderRuntime, given: str) -> None:
    with pytest.raises(EvaluatorError, match="trace_rewards must be an object"):
        await graded(agents, clean, f"""echo '{{"reward": 1, "trace_rewards": {given}}}' > reward.json""")


async def test_the_reward_file_can_be_named(agents: FolderRuntime, clean: FolderRuntime) -> None:
    result = await graded(agents, clean, "mkdir out; echo 1 > reward.json; echo 0.25 > out/r", reward_file="out/r")
    assert result.reward == 0.25


async def test_a_reward_file_may_begin_with_a_byte_order_mark(agents: FolderRuntime, clean: FolderRuntime) -> None:
    result = await graded(agents, clean, r"""printf '\357\273\277{"reward": 0.25}' > reward.json""")
    assert result.reward == 0.25


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo 1 > reward.txt; echo oh no >&2; exit 3", "exited with 3.*oh no"),
        ("true", "wrote no reward.json or reward.txt"),
        ("echo NaN > reward.txt", "no finite number"),
        ("echo -Infinity > reward.json", "no finite number"),
        ("echo 1e999 > reward.json", "no finite number"),
        ("printf '1%0400d' 0 > reward.txt", "no finite number"),
        (
            "echo true > reward.json",
            "no finite number as its reward: 'true'.*such as 0.5, .*1 and 0 for true and false",
        ),
        ("""echo '"1"' > reward.json""", "no finite number"),
        ("echo '{}' > reward.json", "no finite number"),
        ("echo good > reward.txt", "neither a number nor JSON: 'good'. Write a number, such as 0.5"),
        ("ln -s /etc/passwd reward.json", "cannot be read"),
    ],
)
async def test_a_grader_that_breaks_gives_no_reward_at_all(
    agents: FolderRuntime, clean: FolderRuntime, command: str, told: str
) -> None:
    with pytest.raises(EvaluatorError, match=told):
        await graded(agents, clean, command)


async def test_a_grader_that_is_not_done_in_time_gives_no_reward(agents: FolderRuntime, clean: FolderRuntime) -> None:
    with pytest.raises(EvaluatorError, match=r"not done in 0\.5 s"):
        await graded(agents, clean, "echo 1 > reward.txt; sleep 600", timeout_seconds=0.5)


async def test_only_collected_files_come_into_the_clean_runtime(agents: FolderRuntime, clean: FolderRuntime) -> None:
    agents.file("patch.diff").write_text("+1\n")
    agents.file("sitecustomize.py").write_text("raise SystemExit(1)\n")
    agents.file("link").symlink_to("/etc/passwd")
    command = "cat patch.diff; test ! -e sitecustomize.py && test ! -e link && echo 1 > reward.txt"
    result = await graded(agents, clean, command, collect=["patch.diff", "none", "link"])
    assert result.reward == 1.0
    assert result.details["output"] == "+1"
    assert [line.split(":")[0] for line in result.details["missing_files"]] == ["none", "link"]


async def test_hidden_files_win_over_collected_ones(agents: FolderRuntime, clean: FolderRuntime) -> None:
    agents.file("grade.sh").write_text("echo 1 > reward.txt")
    files = {"grade.sh": "echo 0 > reward.txt"}
    assert (await graded(agents, clean, "sh grade.sh", files=files, collect=["grade.sh"])).reward == 0.0


async def test_the_agents_runtime_never_sees_hidden_files_of_a_clean_one(
    agents: FolderRuntime, clean: FolderRuntime
) -> None:
    await graded(agents, clean, "echo 1 > reward.txt", files={"secret": "x"})
    assert not [line for line in agents.log if line.startswith(("upload", "exec"))]
    assert clean.file("secret").exists()


async def test_in_its_own_runtime_the_agents_processes_die_before_hidden_files_arrive(agents: FolderRuntime) -> None:
    await graded(agents, None, "echo 1 > reward.txt", files={"secret": "x"})
    assert agents.log.index("kill") < agents.log.index(f"upload {agents.file('secret')}")


async def test_what_the_agent_left_in_the_graders_places_is_cleared(agents: FolderRuntime, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("keep me")
    agents.file("reward.json").write_text("1")
    agents.file("grade.sh").symlink_to(outside)
    agents.file(".gangline").symlink_to(tmp_path)
    result = await graded(agents, None, "sh grade.sh", files={"grade.sh": "echo 0.5 > reward.txt"})
    assert result.reward == 0.5
    assert result.details["graded_in"] == "agent's runtime"
    assert outside.read_text() == "keep me"


async def test_a_reward_that_the_agent_wrote_does_not_count(agents: FolderRuntime) -> None:
    agents.file("reward.json").write_text("1")
    with pytest.raises(EvaluatorError, match="wrote no"):
        await graded(agents, None, "true")


async def test_the_grader_reads_what_was_really_said(agents: FolderRuntime, clean: FolderRuntime) -> None:
    call = Message("assistant", (Thinking("hm"), Text("I look"), ToolCall("c1", "bash", '{"command": "ls"}')))
    results = Message("tool", (ToolResult("c1", (Text("a"), Text("b"))), ToolResult("c2", (Text("c"),))))
    trace = a_trace(call, results, said("assistant", "done"), prompt=(said("system", "be good"), said("user", "hi")))
    evaluator = plugins.make_evaluator("script", {"command": "echo 1 > reward.txt"})
    await evaluator.evaluate(a_context(agents, fresh=clean, traces=(trace,), stdout=b"I did it"))
    seen = json.loads(clean.file(".gangline/trajectory.json").read_text())
    (seen_trace,) = seen.pop("traces")
    assert seen == {
        "session_id": "s1",
        "instruction": "do it",
        "outcome": "completed",
        "harness_exit": {"exit_code": 0, "signal": None, "timed_out": False},
        "harness_stdout": "I did it",
        "metadata": {"from": "test"},
    }
    assert seen_trace["prompt_messages"] == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
    ]
    assert seen_trace["response_messages"] == [
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ab"},
        {"role": "tool", "tool_call_id": "c2", "content": "c"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize("config", [{}, {"command": ""}, {"command": []}, {"command": "x", "timeout_seconds": 0}])
def test_a_wrong_script_is_refused_when_the_task_is_checked(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        plugins.make_evaluator("script", config)


async def test_hidden_files_may_be_programs_and_need_not_be_text(agents: FolderRuntime, clean: FolderRuntime) -> None:
    files = {
        "t/run": {"content": "#!/bin/sh\ncmp data expected && echo 1 > reward.txt\n", "mode": 0o755},
        "expected": {"content": "/wA=", "encoding": "base64"},
    }
    agents.file("data").write_bytes(b"\xff\0")
    assert (await graded(agents, clean, "t/run", files=files, collect=["data"])).reward == 1.0


def test_a_hidden_file_that_is_not_of_its_encoding_is_refused_at_submit() -> None:
    with pytest.raises(InvalidRequest, match="files"):
        plugins.make_evaluator(
            "script", {"command": "true", "files": {"x": {"content": "no base", "encoding": "base64"}}}
        )


async def test_of_several_reward_files_the_first_that_exists_counts(
    agents: FolderRuntime, clean: FolderRuntime
) -> None:
    named = ["out/reward.json", "out/reward.txt"]
    command = "mkdir out; echo 0.25 > out/reward.txt"
    assert (await graded(agents, clean, command, reward_file=named)).reward == 0.25
    both = await graded(
        agents, clean, "echo '{\"tests\": 0.5}' > out/reward.json; " + command + "; true", reward_file=named
    )
    assert both.reward == 0.5, "the only number of an object is the reward"


async def test_folders_to_clear_are_emptied_whatever_the_agent_made_of_them(
    agents: FolderRuntime, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    locked = agents.file("tests/locked")
    locked.mkdir(parents=True)
    for name in ("conftest.py", ".hidden", "..odd", "locked/file"):
        agents.file(f"tests/{name}").write_text("planted")
    locked.chmod(0)
    agents.file("logs").symlink_to(outside)
    command = "ls -A tests logs; [ ! -L logs ] && [ $(ls -A tests | wc -l) = 1 ] && echo 1 > logs/reward.txt"
    config = {"clear": ["tests", "logs", "new"], "files": {"tests/it": "x"}, "reward_file": "logs/reward.txt"}
    result = await graded(agents, None, command, **config)
    assert result.reward == 1.0
    assert (outside / "kept").read_text() == "mine"


async def test_folders_come_along_with_modes_and_links_but_for_what_is_left_out(
    agents: FolderRuntime, clean: FolderRuntime
) -> None:
    out = agents.file("out")
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "run.sh").write_text("echo 1 > reward.txt")
    (out / "sub" / "run.sh").chmod(0o755)
    (out / "sub" / "big.log").write_text("x" * 99)
    (out / "link").symlink_to("sub/run.sh")
    given = {"out": ("*.log",), "none": ()}
    result = await graded(agents, clean, "test ! -e out/sub/big.log && ./out/link", collect_folders=given)
    assert result.reward == 1.0
    (missing,) = result.details["missing_files"]
    assert missing.startswith("none: ")
    result = await graded(agents, None, "echo 0 > reward.txt", collect_folders={"out": ()})
    assert "missing_files" not in result.details


async def test_an_absolute_folder_comes_to_the_same_place(
    agents: FolderRuntime, clean: FolderRuntime, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "answer").write_text("4")
    command = f'[ "$(cat {out}/answer)" = 4 ] && echo 1 > reward.txt'
    assert (await graded(agents, clean, command, collect_folders={str(out): ()})).reward == 1.0


async def test_a_folder_that_is_too_large_stays_behind(agents: FolderRuntime, clean: FolderRuntime) -> None:
    agents.file("out").mkdir()
    agents.file("out/large").write_bytes(b"x" * 20_000)
    command = "test ! -e out && echo 1 > reward.txt"
    result = await graded(agents, clean, command, collect_folders={"out": ()}, max_collect_bytes=5000)
    assert result.details["missing_files"] == ["out: takes more than 5000 bytes"]


async def test_commands_of_the_collection_run_where_the_agent_worked(
    agents: FolderRuntime, clean: FolderRuntime
) -> None:
    commands = [{"command": "exit 3"}, {"command": "echo 4 > state"}, {"command": "sleep 60", "timeout_seconds": 0.2}]
    result = await graded(agents, clean, "cp state reward.txt", collect=["state"], collect_commands=commands)
    assert result.reward == 4.0
    assert result.details["failed_commands"] == ["exit 3: exit code 3; ", "sleep 60: not done in 0.2 s; "]
    agents.log.clear()
    result = await graded(agents, None, "cp state reward.txt", files={"secret": ""}, collect_commands=commands[1:2])
    assert result.reward == 4.0
    assert agents.log.index("exec echo 4 > state") < agents.log.index(f"upload {agents.file('secret')}"), (
        "no command sees the tests"
    )


async def test_a_folder_that_is_a_link_replaces_no_hidden_file(agents: FolderRuntime, clean: FolderRuntime) -> None:
    agents.file("tests").mkdir()
    agents.file("tests/grade.sh").write_text("echo 1 > reward.txt")
    agents.file("out").symlink_to("tests")
    files = {"tests/grade.sh": "[ -L out ] && echo 0.5 > reward.txt"}
    given: dict[str, Any] = {"out": (), "tests": ()}
    result = await graded(agents, clean, "sh tests/grade.sh", files=files, collect_folders=given)
    assert result.reward == 0.5
