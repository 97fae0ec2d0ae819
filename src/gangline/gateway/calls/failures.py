"""Failures that a session's model calls met: whether its harness could not work for them is judged at its end."""

from __future__ import annotations

from gangline.domain.errors import ContextOverflow, EngineRefused, Failure, GanglineError
from gangline.domain.open_files import out_of_files

__all__ = ["NO_MODEL_CALL", "SessionFailures"]

NO_MODEL_CALL = Failure(
    boundary="harness",
    code="no_model_call",
    message=(
        "the agent ended without a model call. See its logs for why, and whether it uses the base URL and the key that "
        "it was given; if it needs no model, set allow_no_model_call."
    ),
    retryable=False,
)


class SessionFailures:
    """Each is None when calls were answered since."""

    def __init__(self) -> None:
        self.engine: Failure | None = None
        """The engine's, of the last call."""
        self.store: Failure | None = None
        """The journal's, likewise."""
        self.node: Failure | None = None
        """This node died, and took calls in flight along."""
        self.context: Failure | None = None
        """The model's context is full: a call was refused for it. Not ours, but none of the harness's faults either."""

    @property
    def broken(self) -> Failure | None:
        """The failure that kept calls from being answered, if any."""
        return self.engine or self.store

    def clear(self) -> None:
        """A call was answered."""
        self.engine = self.store = self.node = self.context = None

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
    return isinstance(error, EngineRefused) and error.details.get("status") in (400, 413, 422)
