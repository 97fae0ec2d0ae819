"""Files of the host: secrets of the operator, the node's data, programs that everyone runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

from support.hostility.attack import Attacks
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, contents, found

ATTACKS = Attacks("files of the machine")


@ATTACKS.inside
def reads_a_private_file_of_the_host(given: Given) -> str | None:
    return found(given["secret"], [f"{given['victim']['folder']}/secret"])


@ATTACKS.inside
def reads_a_private_file_by_way_of_its_own_folders(given: Given) -> str | None:
    path = given["victim"]["folder"]
    ways = [given["workdir"], given["home"], "/proc/self/cwd", "/proc/self/root", "/dev/fd", "/tmp"]
    return found(given["secret"], [f"{way}{'/..' * 12}{path}/secret" for way in ways])


@ATTACKS.inside
def lists_the_folder_of_the_node(given: Given) -> str | None:
    return f"it lists {os.listdir(given['victim']['folder'])}"


@ATTACKS.inside
def links_a_private_file_into_its_folder(given: Given) -> str | None:
    target = f"{given['workdir']}/linked"
    os.link(f"{given['victim']['folder']}/secret", target)
    try:
        return found(given["secret"], [target])
    finally:
        os.unlink(target)


@ATTACKS.inside
def reads_the_passwords_of_the_machine(given: Given) -> str | None:
    """Those of an image are not secret of the host, but root's all the same."""
    return "/etc/shadow was read" if contents("/etc/shadow") else None


@ATTACKS.inside
def reads_the_home_of_root(given: Given) -> str | None:
    for name in (".bashrc", ".profile", ".bash_history", ".ssh/authorized_keys"):
        if contents(f"/root/{name}"):
            return f"/root/{name} was read"
    return None


@ATTACKS.inside
def reads_private_files_of_the_system(given: Given) -> str | None:
    """Files under /etc that not everyone may read, whoever the agent runs as."""
    for folder, _, names in os.walk("/etc"):
        for path in (os.path.join(folder, name) for name in names):
            try:
                private = not os.stat(path).st_mode & 0o004
            except OSError:
                continue
            if private and contents(path):
                return f"{path} was read"
    return None


@ATTACKS.around()
async def writes_into_folders_of_the_system(grounds: Grounds) -> str | None:
    def writes(given: Given) -> str | None:
        for folder in ("/usr", "/usr/bin", "/etc", "/opt", "/usr/lib", "/bin", "/", "/lib", "/boot", "/srv", "/var"):
            with contextlib.suppress(OSError):
                path = f"{folder}/{given['mark']}"
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                os.unlink(path)
                return f"{folder} can be written"
        return None

    return await grounds.run_inside(writes)


@ATTACKS.inside
def writes_programs_that_others_run(given: Given) -> str | None:
    """Opened, not written."""
    for path in ("/bin/sh", "/usr/bin/env", "/etc/passwd", "/etc/hosts", "/etc/ld.so.cache", sys.executable):
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.realpath(path), os.O_RDWR))
            return f"{path} can be written"
    return None


@ATTACKS.inside
def puts_modules_where_others_import_them(given: Given) -> str | None:
    """All folders that the sandbox's Python imports from, and those of its programs."""
    for folder in [*sys.path, *os.environ.get("PATH", "").split(":")]:
        if os.path.isdir(folder) and not folder.startswith((given["home"], given["workdir"], "/tmp")):
            path = f"{folder}/gangline_hostile.py"
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except OSError:
                continue
            os.unlink(path)
            return f"{folder} can be written"
    return None


@ATTACKS.inside
def changes_modes_and_times_of_programs(given: Given) -> str | None:
    """Sets them to their current values."""
    path = os.path.realpath("/usr/bin/env")
    os.chmod(path, os.stat(path).st_mode & 0o7777)
    return f"the mode of {path} was set"


@ATTACKS.inside
def sets_flags_of_files(given: Given) -> str | None:
    """The immutable flag, which would keep the node from cleaning up."""
    path = f"{given['workdir']}/immutable"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        before = bytearray(8)
        fcntl.ioctl(fd, 0x80086601, before)
        flags = int.from_bytes(before, "little")
        fcntl.ioctl(fd, 0x40086602, (flags | 0x10).to_bytes(8, "little"))
        fcntl.ioctl(fd, 0x40086602, flags.to_bytes(8, "little"))
        return "a file was immutable"
    finally:
        os.unlink(path)


@ATTACKS.inside
def sets_quotas_of_the_disk(given: Given) -> str | None:
    for name in os.listdir("/dev"):
        if name.startswith(("sd", "vd", "nvme", "dm-")):
            return f"/dev/{name} is there"
    return None


@ATTACKS.inside
def finds_other_sandboxes_folders(given: Given) -> str | None:
    """By the host's path of its own."""
    mounts = contents("/proc/self/mountinfo").decode(errors="replace").splitlines()
    roots = {line.split()[3] for line in mounts} | {os.path.dirname(given["victim"]["folder"])}
    for root in roots:
        for folder in (root, os.path.dirname(root), os.path.dirname(os.path.dirname(root))):
            if folder.count("/") > 1 and given["victim"]["name"] in (
                os.listdir(folder) if os.path.isdir(folder) else ()
            ):
                return f"{folder} is seen"
    return None
