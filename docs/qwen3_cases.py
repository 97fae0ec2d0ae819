"""Eight ordinary client behaviours on the real Qwen3 tokenizer and template: `python docs/qwen3_cases.py TOKENIZER`.

Writes the table in docs/token-truth.md. Each case is a session of two calls on a scripted engine; TOKENIZER is a folder
with Qwen3's `tokenizer.json` and `tokenizer_config.json` (`make tools` installs one).

The published rule (Polar, 3.4.2) is `prefix_merging` with `on_divergence = "splice"` over a session whose prompts the
engine rendered itself. `merges`: both turns are one row. `exact`: the ids before the second turn are those that the
engine conditioned it on. `corrupt`: they are not, and between the turns stands something else than what the template
writes there, so that the row holds text which no one wrote.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.task import CaptureSpec
from gangline.domain.trajectory import Trace
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.tokenizer import load_tokenizer
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.capture.prompt_tier import Tier
from gangline.node.capture.stitch import ThinkingPolicy
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.serving.scripted.server import scripted_server

PAGE = Path(__file__).parent / "token-truth.md"
BEGIN, END = "<!-- qwen3-cases: begin -->", "<!-- qwen3-cases: end -->"

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = ToolDefinition("shell", "Run a command.", PARAMETERS)
QUESTION = Message("user", (Text("What is in the folder?"),))
MORE = Message("user", (Text("And what is in it?"),))


def as_it_is(message: Message) -> Message:
    return message


def trimmed(message: Message) -> Message:
    """As most clients keep text: without white space around it, and not at all where nothing is left."""
    texts = [replace(part, text=part.text.strip()) if isinstance(part, Text) else part for part in message.parts]
    return Message("assistant", tuple(part for part in texts if not isinstance(part, Text) or part.text))


def without_thinking(message: Message) -> Message:
    return trimmed(Message("assistant", tuple(part for part in message.parts if not isinstance(part, Thinking))))


@dataclass(frozen=True)
class Case:
    name: str
    reply: dict[str, Any]
    """What the model samples, in the words of a script."""
    echo: Callable[[Message], Message] = as_it_is
    """What the client sends back of it."""
    user_follows: bool = False
    """A user's message follows, else results of the calls."""


def _call(command: str, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"run": command}]} | fields


def _written(arguments: str) -> dict[str, Any]:
    """A call whose arguments the model wrote in exactly these letters."""
    return {"text": f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'}


CASES = (
    Case("thinking echoed, tool result follows", _call("ls", thinking="List it first."), trimmed),
    Case("thinking dropped by the client", _call("ls", thinking="List it first."), without_thinking),
    Case(
        "thinking echoed, user message follows", {"thinking": "Easy.", "text": "One file."}, trimmed, user_follows=True
    ),
    Case("arguments written without spaces", _written('{"command":"ls -l"}')),
    Case(r"`\u` escapes in arguments", _written('{"command": "cat caf\\u00e9"}')),
    Case("trailing newlines trimmed", {"text": "One file.\n\n"}, trimmed, user_follows=True),
    Case("tokens that merge when read again", {"text": "the fishing report", "split": "chars"}, user_follows=True),
    Case("end-of-turn marker in arguments", _call("grep '<|im_end|>' log", split="chars")),
)


class _Journal:
    async def append_all(self, completions: Sequence[Completion]) -> None:
        """Nothing: the session's own tree is all that is read."""


async def completions_of(case: Case, tokenizer: Any, *, tier: Tier, thinking: ThinkingPolicy) -> list[Completion]:
    """The two completions of the case's session."""
    script = {"rules": [{"turn": 0} | case.reply], "default": {"text": "Done."}}
    async with scripted_server(script, tokenizer) as url:
        engine = VllmEngine(url)
        capture = CaptureSpec(tier=tier, thinking=thinking)
        session = ModelSession(SessionSpec(session_id="s", attempt=1, key="key", capture=capture), engine, _Journal())
        try:
            reply = await session.start_call(_model_call((QUESTION,), case)).reply()
            history = (QUESTION, case.echo(reply.choices[0].message), *_follows(reply.choices[0].message, case))
            await session.start_call(_model_call(history, case)).reply()
        finally:
            await engine.close()
    return list(session.tree)


def _model_call(messages: tuple[Message, ...], case: Case) -> ModelCall:
    tools = () if case.user_follows else (SHELL,)
    return ModelCall(dialect="cases", model="scripted", messages=messages, tools=tools)


def _follows(message: Message, case: Case) -> tuple[Message, ...]:
    if case.user_follows:
        return (MORE,)
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    return tuple(Message("tool", (ToolResult(call.call_id, (Text("notes.txt"),)),)) for call in calls)


@dataclass(frozen=True)
class Outcome:
    case: str
    merges: bool
    exact: bool
    corrupt: bool
    t1_exact: bool
    """Stitched, one row, and the ids before the second turn are those that the engine was given."""
    t0: str
    """`one exact row`, or the cause of the split."""


async def outcome_of(case: Case, tokenizer: Any) -> Outcome:
    observed = await completions_of(case, tokenizer, tier="observe", thinking="follow_template")
    stitched = await completions_of(case, tokenizer, tier="auto", thinking="retain")
    published, split, ours = _rows(observed, "splice"), _rows(observed, "split"), _rows(stitched, "split")
    exact = len(published) == 1 and _context_is_the_prompt(published[0], observed)
    certificate = observed[1].certificate
    is_one_row = len(split) == 1 and _context_is_the_prompt(split[0], observed)
    return Outcome(
        case=case.name,
        merges=len(published) == 1,
        exact=exact,
        corrupt=len(published) == 1 and not exact and not _same_between(published[0], ours[0]),
        t1_exact=stitched[1].certificate.prompt_source == "stitched"
        and len(ours) == 1
        and _context_is_the_prompt(ours[0], stitched),
        t0="one exact row" if is_one_row else f"split: `{certificate.cause}`",
    )


def _rows(completions: list[Completion], on_divergence: str) -> tuple[Trace, ...]:
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence}))
    return builder.build(CompletionTree(completions), session_id="s", task_id="t").traces


def _context_is_the_prompt(row: Trace, completions: list[Completion]) -> bool:
    """Of the second turn."""
    before = np.concatenate([row.prompt_ids, row.response_ids[: row.spans[1].start]])
    return np.array_equal(before, CompletionTree(completions).prompt_ids(completions[1]))


def _same_between(row: Trace, other: Trace) -> bool:
    """Whether both have the same ids between their two turns."""
    a, b = (one.response_ids[one.spans[0].end : one.spans[1].start] for one in (row, other))
    return np.array_equal(a, b)


async def outcomes(tokenizer: Any) -> list[Outcome]:
    return [await outcome_of(case, tokenizer) for case in CASES]


def table(found: list[Outcome]) -> str:
    lines = [
        "| client behaviour | published: merges | context exact | corrupt | ours, stitched | ours, observed |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        marks = [_mark(one.merges), _mark(one.exact), _mark(one.corrupt), "exact" if one.t1_exact else "not exact"]
        lines.append(f"| {one.case} | {' | '.join(marks)} | {one.t0} |")
    counts = [sum(values) for values in zip(*((o.merges, o.exact, o.corrupt, o.t1_exact) for o in found), strict=True)]
    lines.append(f"| **of {len(found)}** | {' | '.join(f'**{count}**' for count in counts)} | every row exact |")
    return "\n".join(lines)


def _mark(value: bool) -> str:
    return "yes" if value else "no"


def with_table(page: str, found: list[Outcome]) -> str:
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table(found)}\n{END}", page, flags=re.DOTALL)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER_WITH_QWEN3_TOKENIZER")
    found = asyncio.run(outcomes(load_tokenizer(sys.argv[1])))
    PAGE.write_text(with_table(PAGE.read_text(), found))
    print(table(found))


if __name__ == "__main__":
    main()
