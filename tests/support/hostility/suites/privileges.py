"""Privileges over the machine: users, capabilities, namespaces, mounts, devices, and calls that only root may make.

A call that would do harm where the wall is missing is made wrong on purpose: when it fails for another reason than a
missing permission, the wall was not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat
import subprocess
import time

from support.hostility.attack import Attacks
from support.hostility.kit import Absent, Given, contents, passed_permission, syscall

ATTACKS = Attacks("privileges over the machine")


@ATTACKS.inside
def is_root(given: Given) -> str | None:
    return "its user is 0" if 0 in os.getresuid() else None


@ATTACKS.inside
def becomes_root(given: Given) -> str | None:
    os.setresuid(0, 0, 0)
    return "its user is 0"


@ATTACKS.inside
def becomes_another_user(given: Given) -> str | None:
    os.setresuid(12345, 12345, 12345)
    return "its user is 12345"


@ATTACKS.inside
def joins_the_group_of_root(given: Given) -> str | None:
    os.setresgid(0, 0, 0)
    return "its group is 0"


@ATTACKS.inside
def takes_more_groups(given: Given) -> str | None:
    os.setgroups([0, 4, 6])
    return "it has groups of root, logs and disks"


@ATTACKS.inside
def has_capabilities(given: Given) -> str | None:
    status = contents("/proc/self/status").decode()
    lines = [line.split() for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapAmb"))]
    having = [line for line in lines if int(line[1], 16)]
    return f"{having}" if having else None


@ATTACKS.inside
def may_gain_privileges_by_programs(given: Given) -> str | None:
    return "no_new_privs is not set" if b"NoNewPrivs:\t0" in contents("/proc/self/status") else None


@ATTACKS.inside
def raises_its_capabilities(given: Given) -> str | None:
    """CAP_DAC_OVERRIDE and its like for the first 32."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(0x1, 0x1, 0, 0, 0, 0)
    syscall("capset", header, data)
    return "it has CAP_CHOWN"


@ATTACKS.inside
def becomes_root_by_a_program_that_sets_its_user(given: Given) -> str | None:
    try:
        told = subprocess.run(["su", "-c", "id -u"], stdin=-3, stdout=-1, stderr=-3, timeout=10, check=False).stdout
    except FileNotFoundError:
        raise Absent("no su") from None
    return "su became root" if told.strip() == b"0" else None


@ATTACKS.inside
def runs_a_program_that_keeps_the_rights_of_its_owner(given: Given) -> str | None:
    """Any program of root's with the set-user-id bit, by its effective user once it runs."""
    for folder in ("/usr/bin", "/bin", "/usr/sbin", "/usr/lib/openssh"):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = f"{folder}/{name}"
            if os.path.isfile(path) and os.stat(path).st_mode & 0o4000 and os.stat(path).st_uid == 0:
                child = subprocess.Popen([path], stdin=-1, stdout=-3, stderr=-3)
                status = contents(f"/proc/{child.pid}/status").decode()
                child.kill()
                child.wait()
                users = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
                if users and "0" in users[0]:
                    return f"{path} runs as {users[0]}"
    return None


@ATTACKS.inside
def gives_a_program_capabilities(given: Given) -> str | None:
    path = f"{given['workdir']}/capable"
    with open(path, "w") as file:
        file.write("#!/bin/sh\n")
    os.setxattr(path, "security.capability", bytes.fromhex("0100000201000000000000000000000000000000"))
    os.unlink(path)
    return "a file capability was set"


@ATTACKS.inside
def gives_its_files_to_root(given: Given) -> str | None:
    path = f"{given['workdir']}/given"
    with open(path, "w"):
        pass
    try:
        os.chown(path, 0, 0)
    finally:
        os.unlink(path)
    return "its own file belongs to root"


@ATTACKS.inside
def makes_a_namespace_of_users(given: Given) -> str | None:
    syscall("unshare", 0x10000000)
    return "it is root in a namespace of users"


@ATTACKS.inside
def makes_a_namespace_of_users_with_a_child(given: Given) -> str | None:
    arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
    if (pid := syscall("clone3", ctypes.byref(arguments), 88)) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "its child is root in a namespace of users"


@ATTACKS.inside
def maps_itself_to_root(given: Given) -> str | None:
    outside = os.getuid()
    syscall("unshare", 0x10000000)
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {outside} 1")
    return "it is root in a namespace of users"


@ATTACKS.inside
def makes_a_namespace_of_mounts(given: Given) -> str | None:
    syscall("unshare", 0x00020000)
    return "it has its own mounts"


@ATTACKS.inside
def makes_a_namespace_of_networks(given: Given) -> str | None:
    syscall("unshare", 0x40000000)
    return "it has its own network"


@ATTACKS.inside
def makes_a_namespace_of_processes(given: Given) -> str | None:
    syscall("unshare", 0x20000000)
    return "its children have process ids of their own"


@ATTACKS.inside
def makes_a_namespace_of_control_groups(given: Given) -> str | None:
    syscall("unshare", 0x02000000)
    return "made"


@ATTACKS.inside
def makes_a_namespace_of_names_and_queues(given: Given) -> str | None:
    syscall("unshare", 0x04000000 | 0x08000000)
    return "made"


@ATTACKS.inside
def makes_a_namespace_of_clocks(given: Given) -> str | None:
    syscall("unshare", 0x00000080)
    return "made"


@ATTACKS.inside
def mounts_a_file_system(given: Given) -> str | None:
    target = f"{given['workdir']}/mounted"
    os.makedirs(target, exist_ok=True)
    syscall("mount", b"none", target.encode(), b"tmpfs", 0, None)
    syscall("umount2", target.encode(), 2)
    return "a tmpfs was mounted"


@ATTACKS.inside
def mounts_a_folder_elsewhere(given: Given) -> str | None:
    target = f"{given['workdir']}/bound"
    os.makedirs(target, exist_ok=True)
    syscall("mount", b"/usr", target.encode(), None, 4096, None)
    syscall("umount2", target.encode(), 2)
    return "/usr was bound"


@ATTACKS.inside
def makes_a_mount_writable_again(given: Given) -> str | None:
    """On a path that is not a mount, so that nothing happens."""
    return passed_permission("mount", None, given["workdir"].encode() + b"/.", None, 32 | 4096 | 1, None)


@ATTACKS.inside
def opens_a_file_system_by_the_newer_calls(given: Given) -> str | None:
    return f"descriptor {syscall('fsopen', b'tmpfs', 0)}"


@ATTACKS.inside
def copies_a_tree_of_mounts(given: Given) -> str | None:
    return f"descriptor {syscall('open_tree', -100, b'/', 1 | 0x8000)}"


@ATTACKS.inside
def moves_a_mount(given: Given) -> str | None:
    return passed_permission("move_mount", -100, b"/nowhere-at-all", -100, b"/nowhere-at-all", 0)


@ATTACKS.inside
def changes_attributes_of_a_mount(given: Given) -> str | None:
    return passed_permission("mount_setattr", -100, b"/nowhere-at-all", 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)


@ATTACKS.inside
def unmounts_what_hides_something(given: Given) -> str | None:
    return passed_permission("umount2", given["workdir"].encode() + b"/.", 2)


@ATTACKS.inside
def exchanges_its_root(given: Given) -> str | None:
    return passed_permission("pivot_root", b".", b".")


@ATTACKS.inside
def changes_its_root(given: Given) -> str | None:
    syscall("chroot", b".")
    return "chroot was permitted"


@ATTACKS.inside
def opens_files_by_handles(given: Given) -> str | None:
    """The way out of containers that keep CAP_DAC_READ_SEARCH. The handle is none of any file."""
    handle = ctypes.create_string_buffer((8).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xff" * 8, 32)
    return passed_permission("open_by_handle_at", os.open(given["workdir"], os.O_RDONLY), handle, 0)


@ATTACKS.inside
def makes_a_node_of_a_disk(given: Given) -> str | None:
    path = f"{given['workdir']}/disk"
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(8, 0))
    os.unlink(path)
    return "a node of a disk was made"


@ATTACKS.inside
def makes_a_node_of_the_memory(given: Given) -> str | None:
    path = f"{given['workdir']}/memory"
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 1))
    os.unlink(path)
    return "a node of the memory was made"


@ATTACKS.inside
def opens_devices_of_the_machine(given: Given) -> str | None:
    """All that is not plain device of every sandbox: disks, consoles, virtual machines, FUSE, loops."""
    plain = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
    for name in sorted(set(os.listdir("/dev")) - plain):
        with contextlib.suppress(OSError):
            kind = os.lstat(f"/dev/{name}").st_mode
            if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                os.close(os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                return f"/dev/{name} can be opened"
    return None


@ATTACKS.inside
def turns_on_swapping(given: Given) -> str | None:
    return passed_permission("swapon", b"/nowhere-at-all", 0)


@ATTACKS.inside
def turns_off_accounting(given: Given) -> str | None:
    return passed_permission("acct", None)


@ATTACKS.inside
def reads_the_kernels_log(given: Given) -> str | None:
    return f"{syscall('syslog', 3, ctypes.create_string_buffer(256), 200)} bytes of it"


@ATTACKS.inside
def takes_ports_of_the_machine(given: Given) -> str | None:
    syscall("ioperm", 0x80, 1, 1)
    return "port 0x80 is open"


@ATTACKS.inside
def loads_a_module(given: Given) -> str | None:
    return passed_permission("init_module", b"no module", 9, b"")


@ATTACKS.inside
def unloads_a_module(given: Given) -> str | None:
    return passed_permission("delete_module", b"no_such_module", 0o4000)


@ATTACKS.inside
def prepares_another_kernel(given: Given) -> str | None:
    return passed_permission("kexec_load", 0, 0, None, 0)


@ATTACKS.inside
def restarts_the_machine(given: Given) -> str | None:
    """With a command that there is not."""
    return passed_permission("reboot", 0xFEE1DEAD, 672274793, 1, None)


@ATTACKS.inside
def sets_the_clock(given: Given) -> str | None:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return "the clock was set"


@ATTACKS.inside
def adjusts_the_clock(given: Given) -> str | None:
    """To the rate that it has."""
    timex = ctypes.create_string_buffer(256)
    syscall("adjtimex", timex)
    timex[0:4] = (2).to_bytes(4, "little")
    syscall("adjtimex", timex)
    return "the rate of the clock was set"


@ATTACKS.inside
def names_the_machine(given: Given) -> str | None:
    name = os.uname().nodename.encode()
    syscall("sethostname", name, len(name))
    return "the name was set"


@ATTACKS.inside
def names_the_domain_of_the_machine(given: Given) -> str | None:
    name = contents("/proc/sys/kernel/domainname").strip()
    syscall("setdomainname", name, len(name))
    return "the name was set"


@ATTACKS.inside
def hangs_up_terminals(given: Given) -> str | None:
    if (pid := os.fork()) == 0:
        os.setsid()
        try:
            syscall("vhangup")
        except OSError:
            os._exit(1)
        os._exit(0)
    return "vhangup was permitted" if os.waitpid(pid, 0)[1] == 0 else None


@ATTACKS.inside
def raises_its_priority(given: Given) -> str | None:
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return "it runs before others"


@ATTACKS.inside
def takes_a_place_before_all_others(given: Given) -> str | None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "it runs before everything"


@ATTACKS.inside
def sets_the_program_that_gets_core_dumps(given: Given) -> str | None:
    """Sets it to its current value. It runs on the host, as root."""
    path = "/proc/sys/kernel/core_pattern"
    value = contents(path)
    with open(path, "wb") as file:
        file.write(value)
    return f"{path} was written"


@ATTACKS.inside
def sets_parameters_of_the_kernel(given: Given) -> str | None:
    """Opened, not written. Those of its own namespaces are its own, or ask for permission when written."""
    own = ()  # by the numbers of the first namespaces in include/linux/proc_ns.h
    if os.stat("/proc/self/ns/ipc").st_ino != 0xEFFFFFFF:
        own += ("auto_msgmni", "msg", "sem", "shm")
    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        own += ("ns_last_pid", "pid_max")
    for folder, _, names in os.walk("/proc/sys"):
        if folder.startswith(("/proc/sys/net", "/proc/sys/fs/mqueue", "/proc/sys/user")):
            continue
        others = (name for name in names if not name.startswith(own))
        for path in (os.path.join(folder, name) for name in others):
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY))
                return f"{path} can be written"
    return None


@ATTACKS.inside
def presses_the_magic_key(given: Given) -> str | None:
    """Opened, not written."""
    if not os.path.exists("/proc/sysrq-trigger"):
        raise Absent("the kernel has no such key")
    os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
    return "/proc/sysrq-trigger can be written"


@ATTACKS.inside
def writes_files_of_the_kernel(given: Given) -> str | None:
    """Opened, not written. All of /sys but device trees, which are the same for everyone."""
    for top in ("/sys/kernel", "/sys/module", "/sys/power", "/sys/fs", "/sys/class", "/sys/firmware", "/sys/block"):
        for folder, folders, names in os.walk(top):
            folders[:] = folders[:64]
            for path in (os.path.join(folder, name) for name in names[:64]):
                with contextlib.suppress(OSError):
                    os.close(os.open(path, os.O_WRONLY))
                    return f"{path} can be written"
    return None


@ATTACKS.inside
def makes_a_control_group(given: Given) -> str | None:
    for top, folders, _ in os.walk("/sys/fs/cgroup"):
        folders[:] = folders[:16]
        with contextlib.suppress(OSError):
            os.mkdir(f"{top}/gangline-hostile")
            os.rmdir(f"{top}/gangline-hostile")
            return f"made one in {top}"
    return None


@ATTACKS.inside
def leaves_its_control_group(given: Given) -> str | None:
    """Opened, not written."""
    for line in contents("/proc/self/cgroup").decode().splitlines():
        number, kinds, path = line.split(":", 2)
        names = ["unified", ""] if number == "0" else [kinds, kinds.removeprefix("name=")]
        for place in [f"/sys/fs/cgroup/{name}" for name in names] + [f"/sys/fs/cgroup/{n}{path}" for n in names]:
            with contextlib.suppress(OSError):
                os.close(os.open(f"{place}/cgroup.procs", os.O_WRONLY))
                return f"{place}/cgroup.procs can be written"
    return None


@ATTACKS.inside
def names_a_program_for_the_end_of_a_control_group(given: Given) -> str | None:
    """The way out of containers by `release_agent`: it runs on the host, as root. Opened, not written."""
    for top, folders, names in os.walk("/sys/fs/cgroup"):
        folders[:] = folders[:16]
        for name in ("release_agent", "notify_on_release"):
            if name in names:
                with contextlib.suppress(OSError):
                    os.close(os.open(f"{top}/{name}", os.O_WRONLY))
                    return f"{top}/{name} can be written"
    return None


@ATTACKS.inside
def leaves_core_dumps(given: Given) -> str | None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    return f"core dumps of {hard} bytes are allowed" if hard else None
