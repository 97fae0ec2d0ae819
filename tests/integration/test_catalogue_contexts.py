"""The catalogue of docs/token-truth.md, part one: what a turn is conditioned on. Real tokenizers and templates, through
the proxy; every row that comes out is held against what the engine really saw (`Agent.rows`)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.engines.families import FAMILIES, Turn, families, families_with_thinking, families_with_tools
from support.training.agent_loop import FIRST, SHELL, STITCHED, Agent, agent

LS = ("shell", '{"command": "ls"}')
END_MARKER = {
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "gpt_oss": "<|end|>",
    "glm": "<|user|>",
}


def _thought(name: str, thought: str = "Hm.") -> str:
    return thought if FAMILIES[name].has_thinking else ""


def _no_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}


def _rewritten(message: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The same calls, their arguments parsed and written again."""
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(json.loads(call["function"]["arguments"]), **options)}
        }
        for call in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


# -- 1: token merges -------------------------------------------------------------------------------------------------


@families
async def test_ids_that_no_tokenizer_would_choose_are_the_context_of_the_next_turn(name: str) -> None:
    async with agent(name, [Turn(text="the fishing command", split=True), Turn(text="Yes.")]) as one:
        await one.run(3, then="And now?")
        assert one.kinds == [FIRST, STITCHED, STITCHED]
        assert len(one.rows().traces) == 1


@families
async def test_an_engine_without_exact_ids_is_split_there_with_the_cause(name: str) -> None:
    turns = [Turn(text="the fishing command", split=True), Turn(text="Yes.")]
    async with agent(name, turns, takes_prompt_ids=False) as one:
        await one.run(2, then="And now?")
        assert one.kinds == [FIRST, ("engine", "diverged", "bpe_merge")]
        assert len(one.rows().traces) == 2


# -- 2 and 3: thinking -----------------------------------------------------------------------------------------------


@families_with_thinking
@pytest.mark.parametrize("policy", ["follow_template", "retain"])
async def test_thinking_before_a_user_turn_is_a_new_row_or_kept_as_the_policy_says(name: str, policy: str) -> None:
    turns = [Turn(thinking="Easy one.", text="Hello.")]
    async with agent(name, turns, thinking=policy) as one:
        await one.run(2, then="And now?")
        if policy == "retain":
            assert one.kinds == [FIRST, STITCHED]
        else:
            assert one.kinds == [FIRST, ("engine", "diverged", "thinking_dropped")]
            assert "strips the thinking" in (one.completions[1].certificate.fallback or "")
        assert len(one.rows().traces) == (1 if policy == "retain" else 2)
        seen = one.engine.family.tokenizer().decode(one.engine.seen[1].prompt_ids)
        assert ("Easy one." in seen) == (policy == "retain")


@families_with_thinking
async def test_thinking_that_a_client_never_echoes_is_in_the_context_all_the_same(name: str) -> None:
    turns = [Turn(thinking="List it first.", calls=(LS,)), Turn(thinking="Enough.", text="Done.")]
    async with agent(name, turns, edit=_no_thinking, tools=[SHELL]) as one:
        await one.run(2)
        assert one.kinds == [FIRST, STITCHED]
        assert "List it first." in one.engine.family.tokenizer().decode(one.engine.seen[1].prompt_ids)
        assert len(one.rows().traces) == 1


# -- 4: arguments ----------------------------------------------------------------------------------------------------


@families_with_tools
@pytest.mark.parametrize("arguments", ['{"command":"ls -l"}', '{"command": "cat caf\\u00e9"}', '{ "command" :  "x" }'])
@pytest.mark.parametrize("written", [{}, {"indent": 1}, {"ensure_ascii": False, "separators": (",", ":")}])
async def test_arguments_may_be_written_again_in_any_form(name: str, arguments: str, written: dict[str, Any]) -> None:
    turns = [Turn(thinking=_thought(name), calls=(("shell", arguments),)), Turn(text="Done.")]
    async with agent(name, turns, edit=lambda message: _rewritten(message, **written), tools=[SHELL]) as one:
        await one.run(2)
        assert one.kinds == [FIRST, STITCHED]
        assert len(one.rows().traces) == 1


@families_with_tools
@pytest.mark.parametrize("arguments", ["{}", '{"command": {"a": [1, {"b": "c"}]}}', '{"command":"x"}'])
@pytest.mark.parametrize("coerces", [False, True])
async def test_calls_with_any_arguments_are_stitched_on_engines_that_read_objects_only(
    name: str, arguments: str, coerces: bool
) -> None:
    turns = [Turn(thinking=_thought(name), calls=(("shell", arguments),)), Turn(text="Done.")]
    async with agent(name, turns, tools=[SHELL], coerces_arguments=coerces) as one:
        await one.run(2)
        assert one.kinds == [FIRST, STITCHED]
        assert len(one.rows().traces) == 1


# -- 5: a repaired turn ----------------------------------------------------------------------------------------------


@families
async def test_a_turn_that_the_client_repaired_was_never_sampled_and_is_context_only(name: str) -> None:
    """Qwen3 writes an empty thought into a reply that ends the history, and takes it out once more follows. By default
    a new row follows such a difference."""
    turns = [Turn(text="First."), Turn(text="Secnod."), Turn(text="Third.")]
    async with agent(name, turns, not_as_rendered="stitch") as one:
        await one.run(2, then="Go on.")
        one.messages[-1]["content"] = "Second, repaired."
        await one.run(2, then="Go on.")
        first, second, third, _ = one.completions
        assert second.parent_id == third.parent_id == first.completion_id
        assert one.kinds == [FIRST, STITCHED, STITCHED, STITCHED]
        assert (one.completions[3].certificate.as_rendered is False) == (name == "qwen3")
        main, branch = one.rows().traces
        assert len(main.spans) == 2
        repaired = branch.prompt_ids.tolist()
        assert "Second, repaired." in one.engine.family.tokenizer().decode(repaired)


# -- 6: literal special tokens ---------------------------------------------------------------------------------------


@families
async def test_a_marker_that_the_model_wrote_as_text_stays_text(name: str) -> None:
    text = f"say {END_MARKER[name]} now"
    async with agent(name, [Turn(text=text, split=True), Turn(text="Yes.")]) as one:
        await one.run(2, then="And now?")
        assert one.kinds == [FIRST, STITCHED]
        assert one.completions[0].sampled_ids.tolist() == one.engine.family.sampled(Turn(text=text, split=True))
        assert len(one.rows().traces) == 1


@families_with_tools
async def test_a_marker_in_the_arguments_of_a_call_stays_text(name: str) -> None:
    arguments = json.dumps({"command": f"grep '{END_MARKER[name]}' log"})
    turns = [Turn(thinking=_thought(name), calls=(("shell", arguments),), split=True), Turn(text="Done.")]
    async with agent(name, turns, tools=[SHELL]) as one:
        await one.run(2)
        assert one.kinds == [FIRST, STITCHED]
        assert len(one.rows().traces) == 1


@families_with_tools
async def test_a_marker_in_a_tools_output_changes_nothing_else(name: str) -> None:
    marker = END_MARKER[name]
    turns = [Turn(thinking=_thought(name), calls=(LS,)), Turn(text="Done.")]
    async with agent(name, turns, tools=[SHELL]) as plain, agent(name, turns, tools=[SHELL]) as marked:
        plain.output, marked.output = "aQb", f"a{marker}b"
        await plain.run(2)
        await marked.run(2)
        assert marked.kinds == [FIRST, STITCHED]
        assert marked.suffix(1) == plain.suffix(1).replace("aQb", f"a{marker}b")
        marked.rows()


# -- 7: bytes after the end of turn ----------------------------------------------------------------------------------


@families
async def test_what_a_template_writes_after_the_end_of_turn_is_masked_context(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")]) as one:
        await one.run(2, then="And now?")
        (row,) = one.rows().traces
        between = row.response_ids[row.spans[0].end : row.spans[1].start]
        text = one.engine.family.tokenizer().decode(between.tolist())
        if name in ("qwen3", "smollm2"):
            assert text == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        assert "And now?" in text
        assert not text.startswith(("<|im_end|>", "<|eot_id|>", "<|end|>", "<|user|>"))
        assert not row.loss_mask[row.spans[0].end : row.spans[1].start].any()


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
async def test_a_model_that_samples_those_bytes_itself_has_them_once(name: str) -> None:
    turn = Turn(raw="Hello.<|im_end|>\n", text="Hello.", end="", finish="stop")
    async with agent(name, [turn, Turn(text="Yes.")]) as one:
        await one.run(2, then="And now?")
        assert one.kinds == [FIRST, STITCHED]
        assert one.suffix(1) == "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        assert len(one.rows().traces) == 1


# -- 8: several ends of turn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "turn", "begins"),
    [
        ("llama31", Turn(calls=(LS,), end="<|eom_id|>"), "<|start_header_id|>ipython"),
        ("llama31", Turn(calls=(LS,)), "<|start_header_id|>ipython"),
        ("gpt_oss", Turn(thinking="Hm.", calls=(LS,)), "<|start|>functions.shell to=assistant"),
        (
            "gpt_oss",
            Turn(text="Hello."),
            "<|start|>user<|message|>More?",
        ),  # ends with <|return|>; the template: <|end|>
        ("glm", Turn(thinking="Hm.", calls=(LS,)), "\n<tool_response>\nout"),  # ends with the tool turn's opener
        ("glm", Turn(text="Hello."), "\nMore?"),
        ("qwen3", Turn(text="Hello.", end="<|endoftext|>"), "\n<|im_start|>user\nMore?"),
    ],
)
@pytest.mark.parametrize("says_its_id", [False, True])
async def test_the_end_of_turn_that_was_sampled_is_the_only_one(
    name: str, turn: Turn, begins: str, says_its_id: bool
) -> None:
    """vLLM names the id that ended a turn, unless it is the model's first one."""
    last = FAMILIES[name].sampled(turn)[-1]
    turn = turn if not says_its_id else Turn(**(vars(turn) | {"stop_reason": str(last)}))
    async with agent(name, [turn, Turn(text="Done.")], tools=[SHELL], thinking="retain") as one:
        await one.run(2, then="More?")
        assert one.kinds == [FIRST, STITCHED]
        assert one.suffix(1).startswith(begins)
        assert len(one.rows().traces) == 1


async def test_an_engine_that_renders_another_end_of_turn_is_split_there_and_says_so() -> None:
    """gpt-oss ends an answer with <|return|>, which its template never writes; Llama a call with <|eom_id|>."""
    turns = {"gpt_oss": Turn(text="Hello."), "llama31": Turn(calls=(LS,), end="<|eom_id|>")}
    for name, turn in turns.items():
        async with agent(name, [turn, Turn(text="Yes.")], tools=[SHELL], tier="observe") as one:
            await one.run(2, then="And now?")
            assert one.kinds == [FIRST, ("engine", "diverged", "end_of_turn")]
            assert len(one.rows().traces) == 2


async def test_white_space_that_a_client_adds_is_no_other_end_of_turn() -> None:
    def padded(message: dict[str, Any]) -> dict[str, Any]:
        return message | {"content": message["content"] + " "}

    async with agent("qwen3", [Turn(text="Hello."), Turn(text="Yes.")], tier="observe", edit=padded) as one:
        await one.run(2, then="And now?")
        assert one.kinds == [FIRST, ("engine", "diverged", "whitespace")]


async def test_ends_of_turn_of_a_call_by_the_template_arguments_of_the_session() -> None:
    """With built-in tools Llama's template ends a call with <|eom_id|>."""
    options = {"chat_template_kwargs": {"builtin_tools": ["brave_search"]}}
    async with agent("llama31", [Turn(calls=(LS,), end="<|eom_id|>"), Turn(text="Done.")], tools=[SHELL]) as one:
        await one.run(2, **options)
        assert one.kinds == [FIRST, STITCHED]
        assert one.suffix(1).startswith("<|start_header_id|>ipython")
        one.rows()


# -- 9: truncated and aborted ----------------------------------------------------------------------------------------

CLOSINGS = {
    "qwen3": "<|im_end|>\n",
    "smollm2": "<|im_end|>\n",
    "llama31": "<|eot_id|>",
    "gpt_oss": "<|end|>",
    "glm": "<|user|>",
}


@families
async def test_a_truncated_turn_is_closed_in_masked_context(name: str) -> None:
    async with agent(name, [Turn(text="It is the", finish="length"), Turn(text="end.")]) as one:
        await one.run(2, then="Go on.")
        assert one.completions[0].certificate.finish_reason == "length"
        assert one.kinds == [FIRST, STITCHED]
        assert one.suffix(1).startswith(CLOSINGS[name])
        (row,) = one.rows().traces
        assert not row.loss_mask[row.spans[0].end : row.spans[1].start].any()


@families
async def test_a_truncated_turn_that_was_rendered_again_is_a_new_row(name: str) -> None:
    turns = [Turn(text="the fishing comm", finish="length", split=True), Turn(text="end.")]
    async with agent(name, turns, takes_prompt_ids=False) as one:
        await one.run(2, then="Go on.")
        assert one.completions[1].certificate.context == "diverged"
        assert [trace.finish_reason for trace in one.rows().traces] == ["length", "stop"]


# -- 16: stop strings ------------------------------------------------------------------------------------------------


@families
async def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_ids(name: str) -> None:
    cut = Turn(raw=None, text="Thought: look STOP", stop_reason="STOP")
    async with agent(name, [cut, Turn(text="Done.")]) as one:
        await one.run(2, then="Observation: none")
        first = one.completions[0]
        assert first.certificate.stop_reason == "STOP"
        assert one.engine.family.tokenizer().decode(first.sampled_ids.tolist()).endswith("STOP")
        assert one.kinds == [FIRST, STITCHED]
        assert one.suffix(1).startswith(CLOSINGS[name])
        one.rows()


# -- 26: odd conversations -------------------------------------------------------------------------------------------


@families
async def test_an_empty_reply_is_a_turn_of_one_id(name: str) -> None:
    empty = Turn(raw="", text="")
    async with agent(name, [empty, Turn(text="Yes.")]) as one:
        await one.run(2, then="And now?")
        assert len(one.completions[0].sampled_ids) == 1
        assert one.kinds == [FIRST, STITCHED]
        assert len(one.rows().traces) == 1


@families
async def test_an_empty_tool_list_is_no_tools(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")]) as one:
        await one.call(tools=[])
        one.messages.append({"role": "user", "content": "And now?"})
        await one.call()
        assert one.kinds == [FIRST, STITCHED]


@families
async def test_a_prefill_is_carried_in_its_place_and_is_context_only(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="is fine.")]) as one:
        await one.call()
        one.messages += [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "All of it"}]
        await one.call()
        assert one.kinds == [FIRST, STITCHED]
        text = one.suffix(1)
        assert text.index("And now?") < text.index("All of it")
        (row,) = one.rows().traces
        assert not row.loss_mask[row.spans[0].end : row.spans[1].start].any()


@families
async def test_system_text_in_mid_conversation_keeps_its_place_where_the_template_writes_it(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")]) as one:
        await one.call()
        one.messages += [{"role": "system", "content": "Be brief now."}, {"role": "user", "content": "And now?"}]
        await one.call()
        one.rows()
        if name == "glm":  # the turn ended with the opener of a user's turn, which is not what follows
            assert "does not end" in (one.completions[1].certificate.fallback or "")
            return
        assert one.kinds == [FIRST, STITCHED]
        text = one.suffix(1)
        if name == "gpt_oss":  # its template leaves such messages out; the record has them
            assert "Be brief now." not in text
        else:
            assert text.index("Be brief now.") < text.index("And now?")
        assert [message.role for message in one.completions[1].new_messages] == ["system", "user"]


@families
async def test_a_history_that_ends_with_the_sampled_turn_is_left_to_the_engine(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Again.")]) as one:
        await one.call()
        await one.call()
        certificate = one.completions[1].certificate
        assert certificate.prompt_source == "engine"
        assert "nothing new follows" in (certificate.fallback or "")
        one.rows()


async def _two(one: Agent) -> np.ndarray:
    await one.run(2, then="And now?")
    return one.completions[1].prompt_suffix_ids


@families
async def test_a_stitched_tail_is_what_the_template_itself_would_write(name: str) -> None:
    """Where the sampled ids are the tokenizer's own, stitching and rendering agree to the last id."""
    text = Turn(raw=None, text="Hello.")
    async with agent(name, [text]) as stitched, agent(name, [text], tier="observe") as observed:
        tail = await _two(stitched)
        await _two(observed)
        rendered = observed.engine.seen[1].prompt_ids
        assert rendered[len(rendered) - len(tail) :] == tail.tolist()
