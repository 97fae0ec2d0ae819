"""The eight Qwen3 cases of docs/token-truth.md: the published rule against ours, on the real tokenizer and template."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.engines import tokenizers

DOCS = Path(__file__).parents[2] / "docs"


@cache
def _module() -> Any:
    spec = importlib.util.spec_from_file_location("qwen3_cases", DOCS / "qwen3_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CAUSES = {
    "thinking echoed, tool result follows": None,
    "thinking dropped by the client": "thinking_dropped",
    "thinking echoed, user message follows": "thinking_dropped",
    "arguments written without spaces": "tool_call_reserialised",
    r"`\u` escapes in arguments": "tool_call_reserialised",
    "trailing newlines trimmed": "whitespace",
    "tokens that merge when read again": "bpe_merge",
    "end-of-turn marker in arguments": "special_token_in_text",
}


async def test_the_published_rule_merges_all_eight_of_which_one_is_exact_and_one_corrupt_and_ours_are_exact() -> None:
    found = await _module().outcomes(tokenizers.qwen3())
    assert [one.case for one in found] == list(CAUSES)
    assert all(one.merges for one in found)
    assert [one.case for one in found if one.exact] == ["thinking echoed, tool result follows"]
    assert [one.case for one in found if one.corrupt] == ["end-of-turn marker in arguments"]
    assert all(one.t1_exact for one in found)
    for one, cause in zip(found, CAUSES.values(), strict=True):
        assert one.t0 == ("one exact row" if cause is None else f"split: `{cause}`")
    page = (DOCS / "token-truth.md").read_text()
    assert _module().with_table(page, found) == page, "run docs/qwen3_cases.py"


@pytest.mark.parametrize("number", range(len(CAUSES)))
async def test_by_default_only_a_user_turn_that_takes_thinking_back_is_split_and_says_so(number: int) -> None:
    case = _module().CASES[number]
    _, second = await _module().completions_of(case, tokenizers.qwen3(), tier="auto", thinking="follow_template")
    certificate = second.certificate
    if case.name == "thinking echoed, user message follows":
        assert (certificate.context, certificate.cause) == ("diverged", "thinking_dropped")
        assert "strips the thinking" in certificate.fallback
    else:
        assert (certificate.prompt_source, certificate.context) == ("stitched", "exact")
