"""Selects sessions by their tasks' metadata, outcome and reward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gangline.domain.errors import InvalidRequest
from gangline.domain.lifecycle import OUTCOMES

if TYPE_CHECKING:
    from gangline.cli.results.records import RequestOf
    from gangline.domain.session import SessionResult


def key_and_value(text: str) -> tuple[str, str]:
    """Parse `--where`. Raises: InvalidRequest."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidRequest(f"--where takes KEY=VALUE, such as repo=psf/requests; got {text!r}.")
    return key, value


def checked_outcomes(given: Sequence[str]) -> tuple[str, ...]:
    """Check `--outcome`. Raises: InvalidRequest."""
    for one in given:
        if one not in OUTCOMES:
            raise InvalidRequest(f"--outcome {one!r} is none of {', '.join(OUTCOMES)}.")
    return tuple(given)


class Choice:
    """Selects sessions by their tasks' metadata, their outcomes and a minimum reward. Empty: any.

    Sessions of held-out tasks are left out, and counted in `num_held_out`, unless requested.
    """

    def __init__(
        self,
        request_of: RequestOf,
        *,
        where: Sequence[str] = (),
        outcomes: Sequence[str] = (),
        min_reward: float | None = None,
        held_out: bool = False,
    ) -> None:
        """Raises: InvalidRequest."""
        self.num_held_out = 0
        self._takes_held_out = held_out
        self._where = [key_and_value(one) for one in where]
        self._outcomes = checked_outcomes(outcomes)
        self._min_reward = min_reward

        @lru_cache(maxsize=8)
        def metadata_of(task_id: str) -> dict[str, Any]:
            task = request_of(task_id)
            return {} if task is None else task.metadata

        self._metadata_of = metadata_of

    def takes(self, result: SessionResult) -> bool:
        wanted = self._wants(result)
        if wanted and result.held_out and not self._takes_held_out:
            self.num_held_out += 1
            return False
        return wanted

    def _wants(self, result: SessionResult) -> bool:
        from gangline.domain.task import metadata_value

        if self._outcomes and result.outcome not in self._outcomes:
            return False
        if self._min_reward is not None and not (result.reward is not None and result.reward >= self._min_reward):
            return False
        if not self._where:
            return True
        metadata = self._metadata_of(result.task_id)
        return all(metadata_value(metadata, key) == value for key, value in self._where)
