"""A kind of evidence in one file: the entropy, in nats, of the distribution that each token was drawn from.

For an engine with vLLM's chat route that adds `token_entropies` to each choice of a request with
`return_token_entropy`. Records, exports and the audit of rows need no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.domain.evidence.contract import EvidenceWire, NumbersOfTokens, Reported

__all__ = ["TokenEntropy"]


class TokenEntropy(NumbersOfTokens):
    name = "token_entropy"
    title = "token entropies"
    what = "the entropy of each token"

    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        return _OnChatRoute() if engine == "vllm" else None


class _OnChatRoute(EvidenceWire):
    fields = (("token_entropies", list[float] | None, None),)
    probe = "apart"

    def ask(self, start: int) -> dict[str, Any]:
        return {"return_token_entropy": True}

    def read(self, found: Any) -> Reported | None:
        return None if found.token_entropies is None else Reported(found.token_entropies)
