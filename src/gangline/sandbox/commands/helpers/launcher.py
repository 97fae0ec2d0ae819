"""Execute another program with an empty session keyring. Usage: `main(argv)`; `argv[0]` is searched in PATH."""

from __future__ import annotations

import os

from gangline.sandbox.commands.helpers.namespaces import leave_session_keyring

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(argv: Sequence[str]) -> NoReturn:
    leave_session_keyring()
    os.execvp(argv[0], list(argv))
