"""An action that cannot be executed, with a machine-readable reason."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Union

    Reply = Callable[[Union[Dict[str, Any], "Refused"]], None]
    """Called once with the answer to a request."""


class Refused(Exception):
    """`reason` is a short code such as `not_found`; the message is for people and models."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
