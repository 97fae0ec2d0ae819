"""Whether an engine's ids have the end of a turn: a row without it does not teach a model to end."""

from __future__ import annotations

import asyncio

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, Thinking
from gangline.domain.errors import EngineError
from gangline.domain.tokens import common_prefix_len
from gangline.models.engines.contract import Engine, EngineRequest
from gangline.models.engines.templates.renderings import unless_refused

__all__ = ["reports_ends"]

_ASKED = Message("user", (Text("Say: done."),))
_MAX_TOKENS = 2
"""The end is the next token. With one, engines say that the length ended the reply."""
_WAIT_S = 10.0


async def reports_ends(engine: Engine) -> bool | None:
    """By a reply to a prompt in which only the end of a turn is missing; for engines that take ids.

    None: the model did not end there, or the engine or its template refuses, or takes too long.
    """
    whole, longer = [
        await unless_refused(engine.render((_ASKED, Message("assistant", (Text(said),)), _ASKED)))
        for said in ("Done.", "Done. More.")
    ]
    if whole is None or longer is None:
        return None
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=1.0, top_k=1)
    call = ModelCall(dialect="probe", model="", messages=(_ASKED,), sampling=sampling)
    request = EngineRequest(call=call, prompt_ids=whole[: common_prefix_len(whole, longer)])
    try:
        async with asyncio.timeout(_WAIT_S):
            reply = await engine.chat(request)
    except (EngineError, TimeoutError):
        return None
    choice = reply.choices[0] if reply.choices else None
    if choice is None or choice.sampled_ids is None or choice.finish_reason != "stop":
        return None
    shown = await unless_refused(engine.detokenize(choice.sampled_ids.tolist()))
    text = "".join(part.text for part in choice.message.parts if isinstance(part, Text | Thinking))
    return None if shown is None else shown.strip() != text.strip()
