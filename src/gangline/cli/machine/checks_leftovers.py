"""The check of `gangline doctor` for leftovers of a data folder: folders, containers and control groups of no sandbox,
results that the server refused, old logs. Each comes with the command that removes it.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from gangline.cli.machine.checks import Check
from gangline.domain.errors import GanglineError
from gangline.domain.sandbox import in_binary_units
from gangline.node.identity import owner_of
from gangline.sandbox.confinement.cgroups import group_name, owned_groups
from gangline.settings.machine import Settings
from gangline.wire.client.node import NodeClient
from gangline.wire.client.running import find_service
from gangline.wire.client.server import ServerClient

_OLD_S = 30 * 86_400.0
_NAMED = 5
_ENGINE_S = 10.0


def check_leftovers(settings: Settings) -> Check:
    folder = settings.data_dir.resolve()
    found: list[str] = []
    advice: list[str] = []

    def note(what: str, names: list[str], command: str) -> None:
        if names:
            more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
            found.append(f"{what}: {', '.join(names[:_NAMED])}{more}")
            advice.append(f"{command} {shlex.join(names)}")

    for node in sorted(folder.glob("nodes/*/")):
        owner, ids = owner_of(node), [path.name for path in node.glob("runtimes/*/")]
        note(f"sandboxes' folders of no session (node {node.name})", _orphans(node, ids, settings), "rm -r")
        used = {group_name(owner, runtime_id) for runtime_id in ids}
        groups = [str(group) for group in owned_groups(owner) if group.name not in used]
        note("control groups of no sandbox", groups, "rmdir")
        for program in (settings.docker, settings.podman):
            strays = [name for name in _containers(program, owner) if not any(one in name for one in ids)]
            note(f"containers of no sandbox ({program[0]})", strays, f"{shlex.join(program)} rm --force")
        refused = list(node.glob("outgoing/refused/*"))
        size = in_binary_units(sum(path.stat().st_size for path in refused))
        some = [str(node / "outgoing" / "refused")] if refused else []
        note(f"{len(refused)} results that the server refused ({size}; their tokens are nowhere else)", some, "rm -r")
    old = [path for path in folder.glob("logs/*.log*") if time.time() - path.stat().st_mtime > _OLD_S]
    note("logs that nobody has written to for a month", sorted(map(str, old)), "rm")
    if found:
        return Check(name="leftovers", state="optional", found="; ".join(found), advice="; ".join(advice))
    return Check(name="leftovers", state="ok", found="none")


def _orphans(node: Path, ids: list[str], settings: Settings) -> list[str]:
    """Paths of folders. Of a node that runs, as it says itself; all of one that does not, which its next start removes
    too."""
    if not ids:
        return []
    names = asyncio.run(_orphans_of_running(node.name, settings)) if _is_open(node / "journal" / "lock") else ids
    return [str(node / "runtimes" / name) for name in sorted(names)]


async def _orphans_of_running(node_id: str, settings: Settings) -> list[str]:
    """Empty if it does not answer: the check of the service says so."""
    try:
        service = find_service(settings.data_dir, settings.server_url)
        async with ServerClient(service.server_url, service.control_token) as server:
            url = next((node.url for node in (await server.status()).nodes if node.node_id == node_id), None)
        if url is None:
            return []
        async with NodeClient(url, service.control_token) as node:
            return (await node.status()).orphans
    except GanglineError:
        return []


def _is_open(lock: Path) -> bool:
    """Whether a process holds the lock, by the kernel's list: taking it could stop a node that just starts."""
    try:
        inode = f":{lock.stat().st_ino} "
        return inode in Path("/proc/locks").read_text()
    except OSError:
        return False


def _containers(program: tuple[str, ...], owner: str) -> Iterator[str]:
    """Names of the owner's containers; none where the engine is missing or does not answer."""
    if shutil.which(program[0]) is None:
        return
    command = [*program, "ps", "--all", "--filter", f"label=gangline.owner={owner}", "--format", "{{.Names}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    yield from done.stdout.split()
