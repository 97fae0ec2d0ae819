"""Failures that a session's model calls met: whether its harness could not work for them is judged at its end."""

from __future__ import annotations

from gangline.domain.errors import ContextOverflow, EngineRefused, Failure, GanglineError, MessagesRefused
from gangline.domain.open_files import out_of_files
from gangline.models.engines.contract import Engine
from gangline.node.backends.engine import PooledEngine

__all__ = ["SessionFailures"]

_NEEDS_NONE = "If it needs no model, set allow_no_model_call."

_MOST_REFUSALS = 3
_MOST_CHARACTERS = 500


class SessionFailures:
    """Each is None when calls were answered since; refusals are forgotten then."""

    def __init__(self) -> None:
        self.engine: Failure | None = None
        """The engine's, of the last call."""
        self.store: Failure | None = None
        """The journal's, likewise."""
        self.node: Failure | None = None
        """This node died, and took calls in flight along."""
        self.given_up: tuple[Engine, float] | None = None
        """The engine and the begin (Unix time, UTC, seconds) of the first call without an answer whose client had left,
        or whose session's time was over."""
        self.context: Failure | None = None
        """The model's context is full: a call was refused for it. Not ours, but none of the harness's faults either."""
        self._refusals: dict[str, int] = {}
        """What the agent's requests were answered with -> how many were."""

    @property
    def broken(self) -> Failure | None:
        """The failure that kept calls from being answered, if any."""
        return self.engine or self.store

    def clear(self) -> None:
        """A call was answered."""
        self.engine = self.store = self.node = self.context = self.given_up = None
        self._refusals.clear()

    def note_refusal(self, dialect: str, status: int, message: str) -> None:
        """One of the agent's requests was answered with this error. dialect: its title."""
        answer = f"{dialect}, {status}: {message[:_MOST_CHARACTERS]}"
        if answer in self._refusals or len(self._refusals) < _MOST_REFUSALS:
            self._refusals[answer] = self._refusals.get(answer, 0) + 1

    @property
    def refusals(self) -> str:
        """The errors that the agent's requests were answered with; empty where none was refused."""
        return "; ".join(
            answer if times == 1 else f"{answer} ({times} times)" for answer, times in self._refusals.items()
        )

    def no_model_call(self) -> Failure:
        """The failure of an agent that ended by itself without an answered call."""
        if refused := self.refusals:
            message = f"the agent ended without a model call, for each of its requests was refused: {refused}"
            message = f"{message.rstrip('.')}. See its logs for what it made of that. {_NEEDS_NONE}"
        else:
            message = (
                "the agent ended without a model call. See its logs for why, and whether it uses the base URL and the "
                f"key that it was given. {_NEEDS_NONE}"
            )
        return Failure(boundary="harness", code="no_model_call", message=message, retryable=False)

    async def found(self) -> Failure | None:
        """`broken`, or that of an engine that failed while the agent waited for it in vain."""
        if self.broken is None and self.given_up is not None:
            engine, since = self.given_up
            gone = await engine.failed_since(since) if isinstance(engine, PooledEngine) else None
            return None if gone is None else gone.failure()
        return self.broken

    def note(self, error: BaseException) -> None:
        """A call ended by this error."""
        if (no_files := out_of_files(error)) is not None:
            self.engine = no_files.failure()
            return
        if isinstance(error, ContextOverflow):
            self.context = Failure(boundary="harness", code=error.code, message=error.message, retryable=False)
            return
        if not isinstance(error, GanglineError) or _is_about_the_call(error):
            return
        if error.boundary == "engine":
            self.engine = error.failure()
        elif error.boundary == "store":
            self.store = error.failure()


def _is_about_the_call(error: GanglineError) -> bool:
    """Whether the engine refused the harness's own input."""
    is_refused = isinstance(error, EngineRefused) and not isinstance(error, MessagesRefused)
    return is_refused and error.details.get("status") in (400, 413, 422)
