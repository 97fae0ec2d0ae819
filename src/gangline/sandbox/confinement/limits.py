"""Limits of a sandbox, and how each is enforced.

A control group limits a sandbox as a whole. Without one, an rlimit limits each process: memory by RLIMIT_DATA
(RLIMIT_AS would stop programs that only reserve address space, as every JavaScript engine does), the number of
processes by RLIMIT_NPROC (per user, so correct only if the sandbox has its own user). There is no substitute for cpus.
Disk space is measured: see `disk`.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.task import LimitsSpec

NOT_ENFORCED = "not enforced"
NOT_SET = "not set"
NOT_SUPPORTED = "not supported"
PER_PROCESS = "rlimit, per process"


def grader_enforcement(grader_home: str | None) -> dict[str, str]:
    """The value in `limits()` for the user `grader`."""
    return {"grader_user": NOT_ENFORCED if grader_home is None else "user of its own"}


def refuse_grader(runtime: str) -> RuntimeUnavailable:
    return RuntimeUnavailable(
        f"runtime `{runtime}` on this node has no second user for a grader: run the node as root, with `sandbox`, "
        "`apptainer`, `docker` or `podman`."
    )


class Enforcement:
    """rlimits for every command, and how each limit is enforced."""

    def __init__(self, rlimits: Mapping[int, int], enforced: Mapping[str, str]) -> None:
        self.rlimits = dict(rlimits)
        """RLIMIT number -> value."""
        self.enforced = dict(enforced)
        """Limit name -> how it is enforced."""


def enforcement(limits: LimitsSpec, held: Mapping[str, str], *, own_user: bool) -> Enforcement:
    """Choose the enforcement of each limit.

    `held`: limit name -> how, for limits that a control group or a watch enforces. `own_user`: whether the sandbox has
    its own user, so that other processes do not count against its RLIMIT_NPROC.
    """
    fallbacks = {"memory_bytes": resource.RLIMIT_DATA, "max_file_bytes": resource.RLIMIT_FSIZE}
    if own_user:
        fallbacks["max_pids"] = resource.RLIMIT_NPROC
    rlimits: dict[int, int] = {resource.RLIMIT_CORE: 0}
    if limits.disk_bytes is not None and "disk_bytes" in held:
        rlimits[resource.RLIMIT_FSIZE] = limits.disk_bytes  # at once; a measurement takes seconds
    enforced: dict[str, str] = {}
    for name in LimitsSpec.model_fields:
        value = getattr(limits, name)
        if value is None:
            enforced[name] = NOT_SET
        elif name in held:
            enforced[name] = held[name]
        elif name in fallbacks:
            rlimits[fallbacks[name]] = min(int(value), rlimits.get(fallbacks[name], int(value)))
            enforced[name] = "rlimit" if name == "max_pids" else PER_PROCESS
        else:
            enforced[name] = NOT_ENFORCED
    return Enforcement(rlimits, enforced)
