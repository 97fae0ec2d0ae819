"""Attacks on the action server of another sandbox: on its process, and on its channel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from gangline.agents.tools.action_server import ActionServer
from gangline.domain.errors import ActionRefused, ActionServerFailed
from support.hostility.attack import Assault, Attacks
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, contents, syscall

ATTACKS = Attacks("the tools of another session")

_ANSWER_S = 5.0
_WAYS = {
    "ends_another_sandboxs_action_server": "end",
    "stops_another_sandboxs_action_server": "stop",
    "answers_for_another_sandboxs_action_server": "answer",
}


def disturbs_action_servers(given: Given) -> str | None:
    """Disturb processes with the mark in their environment and a server's bootstrap in their arguments."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if b"gangline_tools" not in contents(f"/proc/{pid}/cmdline"):
                continue
            if given["server"].encode() not in contents(f"/proc/{pid}/environ"):
                continue
            if given["way"] == "answer":
                channel = syscall("pidfd_getfd", syscall("pidfd_open", pid, 0), 3, 0)
                os.write(channel, b'{"id": "forged", "ok": {}}\n')
            else:
                os.kill(pid, signal.SIGKILL if given["way"] == "end" else signal.SIGSTOP)
    return None


def _against_neighbour(way: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        mark = f"{grounds.mark}-{way}"
        server = await ActionServer.start(grounds.neighbour, env={"GANGLINE_HOSTILITY_SERVER": mark})
        try:
            assert (await server.shell.run("echo before", timeout_s=_ANSWER_S)).output.text == "before\n"
            await grounds.run_inside(disturbs_action_servers, server=mark, way=way)
            async with asyncio.timeout(_ANSWER_S):
                said = (await server.shell.run("echo after", timeout_s=_ANSWER_S)).output.text
            return None if said == "after\n" else f"the neighbour's shell said {said!r}"
        except (ActionServerFailed, ActionRefused) as error:
            return error.message
        except TimeoutError:
            return "the neighbour's action server answers no more"
        finally:
            await server.close()

    return run


for _name, _way in _WAYS.items():
    ATTACKS.add(_name, _against_neighbour(_way), needs_isolation=True)
