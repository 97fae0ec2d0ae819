"""Processes that are not the agent's: those of the host, of other sandboxes, and the supervisor of its own command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

from support.hostility.attack import Attacks
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, contents, found, pids, syscall, waiting

ATTACKS = Attacks("processes outside the sandbox")


@ATTACKS.against_both
def sees_command_lines(given: Given) -> str | None:
    return found(given["victim"]["secret"], [f"/proc/{pid}/cmdline" for pid in pids()])


@ATTACKS.against_both
def reads_environments(given: Given) -> str | None:
    return found(given["victim"]["secret"], [f"/proc/{pid}/environ" for pid in pids() if pid != os.getpid()])


@ATTACKS.inside
def is_given_a_secret_of_the_node_in_its_environment(given: Given) -> str | None:
    return found(given["secret"], ["/proc/self/environ"])


@ATTACKS.inside
def inherits_open_files_of_the_node(given: Given) -> str | None:
    opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
    return found(given["secret"], opened)


@ATTACKS.against_both
def reads_open_files_of_a_process(given: Given) -> str | None:
    fd = given["victim"]["unlinked_fd"]
    return found(given["victim"]["secret"], [f"/proc/{pid}/fd/{fd}" for pid in pids()])


@ATTACKS.against_both
def reads_the_working_folder_of_a_process(given: Given) -> str | None:
    return found(given["victim"]["secret"], [f"/proc/{pid}/cwd/secret" for pid in pids()])


@ATTACKS.inside
def reads_files_through_the_root_of_a_process(given: Given) -> str | None:
    path = given["victim"]["folder"]
    return found(given["secret"], [f"/proc/{pid}/root{path}/secret" for pid in pids()])


@ATTACKS.inside
def reads_files_through_the_tasks_of_a_process(given: Given) -> str | None:
    path = given["victim"]["folder"]
    return found(given["secret"], [f"/proc/{pid}/task/{pid}/root{path}/secret" for pid in pids()])


@ATTACKS.against_both
def reads_the_memory_of_a_process(given: Given) -> str | None:
    for pid in pids():
        with contextlib.suppress(OSError, OverflowError):
            fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            if given["victim"]["secret"].encode() in os.pread(fd, 256, given["victim"]["address"]):
                return f"/proc/{pid}/mem has the secret"
    return None


@ATTACKS.against_both
def reads_the_memory_of_a_process_by_a_system_call(given: Given) -> str | None:
    here = ctypes.create_string_buffer(256)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(here), 256)
    remote = (ctypes.c_size_t * 2)(given["victim"]["address"], 256)
    for pid in pids():
        with contextlib.suppress(OSError):
            syscall("process_vm_readv", pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if here.value.decode(errors="replace") == given["victim"]["secret"]:
                return f"the memory of process {pid} has the secret"
    return None


@ATTACKS.around()
async def writes_the_memory_of_a_process_of_the_host(grounds: Grounds) -> str | None:
    def writes(given: Given) -> str | None:
        here = ctypes.create_string_buffer(b"written", 8)
        local = (ctypes.c_size_t * 2)(ctypes.addressof(here), 7)
        remote = (ctypes.c_size_t * 2)(given["victim"]["address"] + 128, 7)
        with contextlib.suppress(OSError):
            syscall("process_vm_writev", given["victim"]["pid"], ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        return None

    await grounds.run_inside(writes)
    return "the victim's memory changed" if b"written" in await grounds.ask_victim("memory") else None


@ATTACKS.around()
async def signals_a_process_of_the_host(grounds: Grounds) -> str | None:
    def signals(given: Given) -> str | None:
        with contextlib.suppress(OSError):
            os.kill(given["victim"]["pid"], 10)
        return None

    before = await grounds.ask_victim("signals")
    await grounds.run_inside(signals)
    return "the signal arrived" if await grounds.ask_victim("signals") != before else None


@ATTACKS.around()
async def signals_everyone(grounds: Grounds) -> str | None:
    def signals(given: Given) -> str | None:
        for pid in pids():
            with contextlib.suppress(OSError):
                if given["victim"]["secret"].encode() in contents(f"/proc/{pid}/cmdline"):
                    syscall("pidfd_send_signal", syscall("pidfd_open", pid, 0), 10, None, 0)
        return None

    before = await grounds.ask_victim("signals")
    await grounds.run_inside(signals)
    return "the signal arrived" if await grounds.ask_victim("signals") != before else None


@ATTACKS.inside
def traces_a_process_of_the_host(given: Given) -> str | None:
    """PTRACE_SEIZE stops nobody, and ends with the tracer."""
    syscall("ptrace", 0x4206, given["victim"]["pid"], 0, 0)
    path = f"/proc/{given['victim']['pid']}/cmdline"
    return "it is traced" if given["secret"].encode() in contents(path) else None


@ATTACKS.inside
def traces_its_supervisor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    syscall("ptrace", 0x4206, supervisor, 0, 0)
    return "the supervisor is traced"


@ATTACKS.inside
def reads_the_memory_of_its_supervisor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    with open(f"/proc/{supervisor}/maps") as maps, open(f"/proc/{supervisor}/mem", "rb") as memory:
        stack = next((line for line in maps if "[stack]" in line or "[heap]" in line), None)
        if stack is None:
            return None
        memory.seek(int(stack.split("-")[0], 16))
        return "its memory was read" if memory.read(4096) else None


@ATTACKS.inside
def reads_the_memory_of_its_supervisor_by_a_system_call(given: Given) -> str | None:
    supervisor = given["supervisor"]
    here = ctypes.create_string_buffer(64)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(here), 64)
    try:
        syscall("process_vm_readv", supervisor, ctypes.byref(local), 1, ctypes.byref(local), 1, 0)
    except OSError as error:
        return "only the address was wrong" if error.errno == 14 else None
    return "its memory was read"


@ATTACKS.inside
def opens_the_files_of_its_supervisor(given: Given) -> str | None:
    """Their numbers alone say nothing."""
    folder = f"/proc/{given['supervisor']}/fd"
    return f"it has {[os.readlink(f'{folder}/{number}') for number in os.listdir(folder)]} open"


@ATTACKS.inside
def reads_the_environment_of_its_supervisor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    with open(f"/proc/{supervisor}/environ", "rb") as file:
        return "it was read" if file.read() else None


@ATTACKS.inside
def takes_descriptors_of_its_supervisor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    pidfd = syscall("pidfd_open", supervisor, 0)
    return f"descriptor {syscall('pidfd_getfd', pidfd, 0, 0)} is its standard input"


@ATTACKS.inside
def traces_its_spawner(given: Given) -> str | None:
    syscall("ptrace", 0x4206, given["spawner"], 0, 0)
    return "the spawner is traced"


@ATTACKS.inside
def reads_the_memory_of_its_spawner(given: Given) -> str | None:
    spawner = given["spawner"]
    with open(f"/proc/{spawner}/maps") as maps, open(f"/proc/{spawner}/mem", "rb") as memory:
        memory.seek(int(next(line for line in maps if "[heap]" in line or "[stack]" in line).split("-")[0], 16))
        return "its memory was read" if memory.read(4096) else None


@ATTACKS.inside
def opens_the_files_of_its_spawner(given: Given) -> str | None:
    folder = f"/proc/{given['spawner']}/fd"
    return f"it has {[os.readlink(f'{folder}/{number}') for number in os.listdir(folder)]} open"


@ATTACKS.inside
def takes_the_orders_of_its_spawner(given: Given) -> str | None:
    pidfd = syscall("pidfd_open", given["spawner"], 0)
    for number in range(64):
        with contextlib.suppress(OSError):
            return f"descriptor {syscall('pidfd_getfd', pidfd, number, 0)} is its descriptor {number}"
    return None


@ATTACKS.inside
def reads_the_environment_of_its_spawner(given: Given) -> str | None:
    with open(f"/proc/{given['spawner']}/environ", "rb") as file:
        return "it was read" if file.read() else None


@ATTACKS.inside
def takes_descriptors_of_a_process_of_the_host(given: Given) -> str | None:
    fd = syscall("pidfd_getfd", syscall("pidfd_open", given["victim"]["pid"], 0), given["victim"]["unlinked_fd"], 0)
    return "it has the secret" if given["secret"].encode() in os.pread(fd, 256, 0) else None


@ATTACKS.inside
def compares_its_supervisor_with_itself(given: Given) -> str | None:
    supervisor = given["supervisor"]
    return f"kcmp says {syscall('kcmp', supervisor, os.getpid(), 0, 0, 0)}"


@ATTACKS.inside
def slows_its_supervisor_down(given: Given) -> str | None:
    """To a priority at which it is already."""
    supervisor = given["supervisor"]
    os.setpriority(os.PRIO_PROCESS, supervisor, os.getpriority(os.PRIO_PROCESS, supervisor))
    return "its priority was set"


@ATTACKS.inside
def pins_its_supervisor_to_one_processor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    os.sched_setaffinity(supervisor, os.sched_getaffinity(supervisor))
    return "its affinity was set"


@ATTACKS.inside
def sets_limits_of_its_supervisor(given: Given) -> str | None:
    """To those that it has already."""
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
        resource.prlimit(given["supervisor"], limit, resource.prlimit(given["supervisor"], limit))
    return "its limits were set"


@ATTACKS.inside
def names_its_supervisor_as_the_first_to_end(given: Given) -> str | None:
    """When memory runs out; the score is the one that it has already."""
    path = f"/proc/{given['supervisor']}/oom_score_adj"
    score = contents(path)
    with open(path, "wb", buffering=0) as file:
        file.write(score)
    return "its score was set"


@ATTACKS.inside
def enters_the_namespaces_of_its_supervisor(given: Given) -> str | None:
    supervisor = given["supervisor"]
    for kind in ("user", "mnt", "net", "pid"):
        with contextlib.suppress(OSError):
            syscall("setns", os.open(f"/proc/{supervisor}/ns/{kind}", os.O_RDONLY), 0)
            return f"entered its {kind}"
    return None


@ATTACKS.inside
def enters_namespaces_through_a_descriptor_of_the_process(given: Given) -> str | None:
    supervisor = given["supervisor"]
    syscall("setns", syscall("pidfd_open", supervisor, 0), 0x00020000)
    return "entered the mounts of its supervisor"


# -- processes of ours that wait alongside a command to become the next one, and will get its descriptors -----------


@ATTACKS.inside
def traces_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError):
            syscall("ptrace", 0x4206, pid, 0, 0)
            return f"process {pid} is traced"
    return None


@ATTACKS.inside
def reads_the_memory_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            memory.seek(int(next(line for line in maps if "[heap]" in line or "[stack]" in line).split("-")[0], 16))
            if memory.read(4096):
                return f"the memory of process {pid} was read"
    return None


@ATTACKS.inside
def takes_the_order_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError):
            pidfd = syscall("pidfd_open", pid, 0)
            for number in range(64):
                with contextlib.suppress(OSError):
                    return f"descriptor {syscall('pidfd_getfd', pidfd, number, 0)} is descriptor {number} of {pid}"
    return None


@ATTACKS.inside
def reads_the_environment_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        if contents(f"/proc/{pid}/environ"):
            return f"the environment of process {pid} was read"
    return None
