"""The two pipes between a sandbox's daemon and the node's `exec` calls. Standard library only.

    pipes send MESSAGE | @FILE   pass on the node's message, as base64 or in a file
    pipes hear [+]SECONDS        print the daemon's output, waiting up to that long for it to begin

The pipes are in a folder owned by root. `send` fails without a reading daemon, `hear` without a writing one.
"""

from __future__ import annotations

import base64
import os
import select
import time

BEGINS, ENDS = "<<<", ">>>"
"""Mark the start and end of the base64 output, because an environment's `exec` may print more."""
_PIECE = 1 << 16
_HEARD_BYTES = 3 << 19
"""Limit of one read."""
_PAUSE_S = 0.03
"""Pass on the output after this many seconds without more of it."""


def send(folder: str, argument: str) -> None:
    """Raises: OSError when no daemon reads."""
    if argument.startswith("@"):
        with open(argument[1:], "rb") as file:
            message = file.read()
        os.unlink(argument[1:])
    else:
        message = base64.b64decode(argument)
    fd = os.open(f"{folder}/in", os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    left = memoryview(message)
    while left:
        left = left[os.write(fd, left) :]


def hear(folder: str, argument: str) -> None:
    """argument: seconds, with a leading `+` if the environment passes on lines as they are printed, so that more may
    follow.

    Raises: EOFError when the daemon is gone.
    """
    follows, seconds = argument.startswith("+"), float(argument)
    fd = os.open(f"{folder}/out", os.O_RDONLY | os.O_NONBLOCK)
    end_at = time.monotonic() + seconds
    is_first = True
    while is_first or (follows and time.monotonic() < end_at):
        heard = bytearray()
        while len(heard) < _HEARD_BYTES and select.select([fd], [], [], _PAUSE_S if heard else seconds)[0]:
            piece = os.read(fd, _PIECE)
            if not piece:
                raise EOFError("the daemon is gone")
            heard += piece
        print(f"{BEGINS}{base64.b64encode(heard).decode()}{ENDS}", flush=True)
        is_first = False
