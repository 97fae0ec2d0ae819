"""Requirements on every runtime, as checks that any runtime's author can run.

    @pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
    async def test_my_runtime(check, tmp_path):
        await run_check(check, MyRuntime(), tmp_path, isolated=True)

`isolated` means that the runtime promises isolation (own processes, own files). Other missing features must be reported
by `limits()`: a limit or a network that is `not enforced` is not checked, and the check raises `unittest.SkipTest`,
which pytest reports as a skip. A failed check raises AssertionError with the expectation.

Programs that a sandbox must contain: `sh`, coreutils, grep, findutils, util-linux (`setsid`, `flock`) and `python3`. A
runtime that requires an image is given one by `image`.

No check sleeps and hopes that something has happened. To find out whether a process lives, checks query a lock that it
holds: a lock is released with the last process that has its file open, even if that is a daemon, stopped, or an orphan.
Start with `lifecycle`.
"""

from __future__ import annotations

from gangline.testing.runtime_conformance import (
    channels,
    checkpoints,
    commands,
    files,
    graders,
    isolation,
    lifecycle,
    limits,
    network,
    network_list,
    process_trees,
    streams,
    system_calls,
    tools,
)
from gangline.testing.runtime_conformance.bench import Bench, Check, Checks, run_check

__all__ = ["Bench", "Check", "checks", "run_check"]

_PARTS: tuple[Checks, ...] = tuple(
    part.CHECKS
    for part in (
        *(
            commands,
            streams,
            channels,
            files,
            checkpoints,
            process_trees,
            lifecycle,
            limits,
            network,
            network_list,
            isolation,
            graders,
            system_calls,
            tools,
        ),
    )
)


def checks(*, isolated: bool) -> list[Check]:
    """The checks that apply to a runtime with or without isolation."""
    return [check for part in _PARTS for check in part.applying(isolated=isolated)]
