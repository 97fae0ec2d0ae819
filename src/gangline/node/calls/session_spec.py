"""One session as its caller or the server requested it."""

from __future__ import annotations

import msgspec

from gangline.domain.task import CaptureSpec


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    attempt: int
    key: str | bytes
    """The session's key, or its digest if the key is no longer known here."""
    environment_key: str | None = None
    """Key for model calls of the session's environments, which do not count towards the agent's limits; None: there are
    none."""
    task_id: str = ""
    """Sessions of one task prefer the same engine."""
    capture: CaptureSpec = CaptureSpec()
    sample_index: int = 0
    """The session's number in its group; each draws different seeds."""
    max_turns: int | None = None
    """Model calls; None: no limit."""
    max_sampled_tokens: int | None = None
    """Over all calls; None: no limit."""
    max_repeated_actions: int | None = None
    """Times in a row; see `is_loop`. None: no limit."""
    retry_window_s: float = 600.0
    """How long a call's answer is kept for retries."""
    retry_grace_s: float = 5.0
    """How long a call waits for a retry when its client disconnected before it was sent anything."""
