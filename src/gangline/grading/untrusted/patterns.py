"""Matches regular expressions on untrusted text in a separate process.

Python's `re` can take exponential time on crafted text, holds the interpreter meanwhile, and cannot be stopped: inside
the node one answer could stall every session.
"""

from __future__ import annotations

import asyncio
import json
import sys

from gangline.domain.errors import EvaluatorError, TaskAtFault
from gangline.grading.untrusted.isolated import ENVIRONMENT

_CHILD = """
import json, re, sys
job = json.load(sys.stdin)
flags = {False: 0, True: re.IGNORECASE}
json.dump([bool(re.search(pattern, job["text"], flags[ignore])) for pattern, ignore in job["patterns"]], sys.stdout)
"""


async def matches(patterns: list[tuple[str, bool]], text: str, *, timeout_s: float) -> list[bool]:
    """Whether each pattern is found in `text`. Each pattern is paired with whether it ignores case.

    Raises: TaskAtFault if it takes longer than `timeout_s`; EvaluatorError.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, _ = await child.communicate(json.dumps({"patterns": patterns, "text": text}).encode())
    except TimeoutError:
        raise TaskAtFault(
            f"the task's regular expressions took longer than {timeout_s:g} s on the agent's output: make them simpler "
            "(no repeats inside repeats), or anchor them"
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise EvaluatorError(f"the process that matches regular expressions ended with {child.returncode}")
    return json.loads(stdout)
