"""What Gemini CLI, Qwen Code and opencode are told; that any adapter keeps the contract is the conformance suite's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.harnesses.gemini_cli import GeminiCliConfig, GeminiCliHarness
from gangline.agents.harnesses.opencode import OpencodeConfig, OpencodeHarness
from gangline.agents.harnesses.qwen_code import QwenCodeConfig, QwenCodeHarness
from gangline.agents.harnesses.shared.prompt import prompt_argument
from gangline.domain.contracts import HarnessContext, Launch
from support.node.folder_runtime import FolderRuntime


async def prepared(
    harness: GeminiCliHarness | QwenCodeHarness | OpencodeHarness, folder: Path
) -> tuple[Launch, FolderRuntime]:
    program = harness.program
    tools = folder / "bin"
    tools.mkdir()
    (tools / program.command).write_text(f"#!/bin/sh\necho {program.version}\n")
    (tools / program.command).chmod(0o755)
    runtime = FolderRuntime(folder / "r1", path=f"{tools}:/usr/bin:/bin")
    context = HarnessContext(
        session_id="s1",
        task_id="t1",
        instruction="do it",
        model="org/model:1",
        base_url="http://127.0.0.1:8642/s/s1",
        api_key="key-1",
        runtime=runtime,
        env={},
    )
    return await harness.prepare(context), runtime


def written(runtime: FolderRuntime, path: str) -> dict[str, Any]:
    return json.loads((Path(runtime.home) / path).read_text())


async def test_gemini_cli_compresses_its_history_before_the_real_context_is_full(tmp_path: Path) -> None:
    _, runtime = await prepared(GeminiCliHarness(GeminiCliConfig(context_window=40_000)), tmp_path)
    model = written(runtime, ".gemini/settings.json")["model"]
    assert model["compressionThreshold"] * 1_048_576 == pytest.approx(30_000)  # of what it takes a context for
    assert model["disableLoopDetection"] is True


async def test_gemini_cli_is_given_a_system_prompt_as_a_file(tmp_path: Path) -> None:
    launch, runtime = await prepared(GeminiCliHarness(GeminiCliConfig(system_prompt="You are brief.")), tmp_path)
    path = launch.env["GEMINI_SYSTEM_MD"]
    assert path.startswith(runtime.home)
    assert Path(path).read_text() == "You are brief."


async def test_qwen_code_writes_no_memories_and_asks_for_as_many_tokens_as_it_may(tmp_path: Path) -> None:
    _, runtime = await prepared(QwenCodeHarness(QwenCodeConfig(max_tokens=77)), tmp_path)
    settings = written(runtime, ".qwen/settings.json")
    assert set(settings["memory"].values()) == {False}
    assert settings["model"]["generationConfig"]["samplingParams"] == {"max_tokens": 77}


@pytest.mark.parametrize(
    ("api", "package", "base_url"),
    [
        ("chat", "@ai-sdk/openai-compatible", "http://127.0.0.1:8642/s/s1/v1"),
        ("google", "@ai-sdk/google", "http://127.0.0.1:8642/s/s1/v1beta"),
    ],
)
async def test_opencode_has_one_provider_whose_key_stays_in_the_environment(
    tmp_path: Path, api: Any, package: str, base_url: str
) -> None:
    launch, runtime = await prepared(OpencodeHarness(OpencodeConfig(api=api)), tmp_path)
    settings = written(runtime, ".config/opencode/opencode.json")
    (provider,) = settings["provider"].values()
    assert provider["npm"] == package
    assert provider["options"] == {"baseURL": base_url, "apiKey": "{env:GANGLINE_API_KEY}"}
    assert settings["small_model"] in launch.command, "its title is asked of the session's model"
    assert settings["permission"] == {"*": "allow", "webfetch": "deny"}


@pytest.mark.parametrize("instruction", ["it's", "", "\"a\" or 'b'", "--help"])
def test_an_instruction_is_an_argument_where_that_is_safe(instruction: str) -> None:
    assert prompt_argument(instruction) == ([f"--prompt={instruction}"], None)


@pytest.mark.parametrize("instruction", ['"say it"', "'a' and 'b'", "x" * 200_000, "a\0b"])
def test_an_instruction_that_the_command_line_would_change_goes_to_standard_input(instruction: str) -> None:
    assert prompt_argument(instruction) == ([], instruction.encode())
