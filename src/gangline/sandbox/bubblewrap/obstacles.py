"""Why this machine cannot run a sandbox, and the one line that changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["obstacle"]

_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)


def obstacle(complaint: str, proc_sys: Path = Path("/proc/sys"), path: str | None = None) -> str:
    """A message for people. `complaint`: the error output of the attempt; `path`: where programs are looked for."""
    if shutil.which("bwrap", path=path) is None:
        return "bubblewrap is not installed. Run, as root: apt-get install -y bubblewrap"
    for name, closed, line in _SYSCTLS:
        file = proc_sys / name
        if file.exists() and file.read_text().strip() == closed:
            return f"this kernel forbids user namespaces to ordinary users ({complaint}). Run, as root: {line}"
    if "proc" in complaint and "mount" in complaint.lower():
        return (
            f"a sandbox cannot have its own /proc here ({complaint}). This container hides parts of /proc: start it "
            "with `--security-opt systempaths=unconfined`, or run as root with CAP_SYS_ADMIN."
        )
    if "namespace" in complaint or "not permitted" in complaint or "uid map" in complaint:
        return (
            f"namespaces cannot be made here ({complaint}). In a container, start it with `--security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined`."
        )
    return f"a sandbox does not start: {complaint}"
