"""The options of `gangline export`, which select sessions by their tasks' metadata, outcome and reward."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.domain.errors import InvalidRequest
from gangline.domain.lifecycle import OUTCOMES

if TYPE_CHECKING:
    from gangline.cli.results.records import RequestOf
    from gangline.domain.session import SessionResult


class RowFormat(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    msgpack = "msgpack"
    messages = "messages"
    atif = "atif"
    verifiers = "verifiers"
    csv = "csv"


class HeldOut(StrEnum):
    exclude = "exclude"
    include = "include"


SessionNames = Annotated[
    list[str],
    typer.Argument(metavar="TASK|SESSION|PATTERN...", help="Such as task-1, task-1.0, swe-*.", show_default=False),
]
FormatOption = Annotated[
    RowFormat,
    typer.Option(
        "--format",
        help="messages: main conversations in OpenAI's form, as JSON lines. atif: a folder with one document for each "
        "session, for Harbor's tools. verifiers: a folder with traces.jsonl, for "
        "verifiers and prime-rl. csv: one line for each session, with its reward, tokens, seconds and resources.",
    ),
]
FileNameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the file. Default: the task's, else rows.", show_default=False)
]
WhereTaskOption = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Only tasks with this value in their metadata; repeatable."),
]
OfOutcomeOption = Annotated[
    list[str] | None, typer.Option("--outcome", help="Only sessions that ended so; repeatable.")
]
LeastRewardOption = Annotated[
    float | None, typer.Option("--min-reward", help="Only sessions of at least this reward.", show_default=False)
]
BuilderOption = Annotated[
    str | None,
    typer.Option(
        "--builder",
        help='Build the rows anew: a builder\'s name, or JSON with its settings, such as {"strategy": "tree"}.',
        show_default=False,
    ),
]
WholePromptsOption = Annotated[
    bool, typer.Option("--whole-prompts", help="Write full prompts for rows that share them (builder `tree`).")
]
VerdictsOption = Annotated[
    str | None,
    typer.Option(
        "--verdicts",
        metavar="NAME",
        help="Rewards of `gangline regrade --name NAME` instead of the recorded ones; sessions without one are left "
        "out.",
        show_default=False,
    ),
]
HeldOutOption = Annotated[
    HeldOut,
    typer.Option(
        "--held-out",
        help="Sessions that measure: of `gangline eval`, a run's evaluations, tasks with `held_out`. They are left out "
        "and counted, also where they are named.",
    ),
]


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
