"""SWE-ReX (PyPI `swe-rex`), its local deployment: no isolation, in this very process.

    python swe_rex.py NUM_LIVES NUM_COMMANDS

Prints JSON: milliseconds of each `start` (with the shell that an agent works in), `exec` (a command as a process of its
own), `session` (a command in that shell) and `stop`. Runs in its own environment.
"""

import asyncio
import json
import logging
import sys
import time

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

TIMES_MS = {"start": [], "exec": [], "session": [], "stop": []}


async def timed(step, work):
    began_at = time.perf_counter()
    result = await work
    TIMES_MS[step].append(1000 * (time.perf_counter() - began_at))
    return result


async def start(deployment):
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())


async def live(num_commands):
    deployment = LocalDeployment()
    await timed("start", start(deployment))
    for _ in range(num_commands):
        done = await timed("exec", deployment.runtime.execute(Command(command=["true"])))
        assert done.exit_code == 0
        done = await timed("session", deployment.runtime.run_in_session(BashAction(command="true")))
        assert done.exit_code == 0
    await timed("stop", deployment.stop())


async def main(num_lives, num_commands):
    logging.disable(logging.CRITICAL)
    for _ in range(int(num_lives)):
        await live(int(num_commands))
    print(json.dumps(TIMES_MS))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
