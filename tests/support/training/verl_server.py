"""A rollout server of verl's for tests: a Ray actor that gives the answers it was made with."""

from __future__ import annotations

from typing import Any


class Server:
    """It is aborted as its answers say, and has new weights in each."""

    def __init__(self, parts: list[tuple[list[int], str]]) -> None:
        """parts: ids and stop reason of each answer."""
        self._parts = parts
        self._asked: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self._asked.append((prompt_ids, dict(sampling_params)))
        number = len(self._asked)
        ids, reason = self._parts[number - 1]
        fields = {"global_steps": number}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason=reason, extra_fields=fields)

    async def asked(self) -> list[tuple[list[int], dict[str, Any]]]:
        """(prompt, parameters) of each call."""
        return self._asked
