"""The size of an engine's vocabulary, reported by the engine; ids beyond it have no token.

No route of vLLM or SGLang reports it. Both refuse a `logit_bias` for an unknown id before sampling, and the error names
the size. Engines that report token ids are new enough to check that; older ones are not asked.

Source: vLLM 0.32 `sampling_params.py` (`_validate_logit_bias`), SGLang 0.5.23 `sampling_params.py` (`verify`).
"""

from __future__ import annotations

import re

import msgspec

from gangline.domain.errors import EngineError
from gangline.models.engines.http import EngineHttp

_IMPOSSIBLE_ID = 2**31 - 1
_OF_VLLM = re.compile(r"[Vv]ocabulary size: (\d+)")
_OF_SGLANG = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")


async def vocabulary_size(http: EngineHttp, model: str) -> int | None:
    """Ids of the engine are below it; None if the engine does not report it. Call it only once ids were reported."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "logit_bias": {str(_IMPOSSIBLE_ID): 0},
    }
    try:
        await http.post("/v1/chat/completions", msgspec.json.encode(body))
    except EngineError as refused:
        if found := _OF_VLLM.search(refused.message):
            return int(found[1])
        if found := _OF_SGLANG.search(refused.message):
            return int(found[1]) + 1
    return None
