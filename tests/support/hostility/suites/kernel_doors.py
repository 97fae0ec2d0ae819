"""Doors of the kernel that agents do not need, and through which most of its holes were: each must be shut."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from support.hostility.attack import Attacks
from support.hostility.kit import Given, contents, syscall

ATTACKS = Attacks("doors of the kernel")


@ATTACKS.inside
def opens_an_io_uring(given: Given) -> str | None:
    return f"descriptor {syscall('io_uring_setup', 1, ctypes.create_string_buffer(256))}"


@ATTACKS.inside
def handles_page_faults_itself(given: Given) -> str | None:
    return f"descriptor {syscall('userfaultfd', 0)}"


@ATTACKS.inside
def handles_its_own_page_faults(given: Given) -> str | None:
    """The kernel allows UFFD_USER_MODE_ONLY to everyone."""
    return f"descriptor {syscall('userfaultfd', 1)}"


@ATTACKS.inside
def loads_a_program_into_the_kernel(given: Given) -> str | None:
    """Two instructions, of a kind that ordinary users may load where the machine allows it: a socket's filter."""
    program = (ctypes.c_uint64 * 2)(0xB7, 0x95)
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = (ctypes.c_uint64 * 16)(1 | 2 << 32, ctypes.addressof(program), ctypes.addressof(licence))
    return f"descriptor {syscall('bpf', 5, attributes, 128)}"


@ATTACKS.inside
def makes_a_map_in_the_kernel(given: Given) -> str | None:
    return f"descriptor {syscall('bpf', 0, (ctypes.c_uint32 * 18)(2, 4, 8, 1), 72)}"


@ATTACKS.inside
def measures_the_whole_machine(given: Given) -> str | None:
    event = ctypes.create_string_buffer((1).to_bytes(4, "little") + (112).to_bytes(4, "little"), 112)
    return f"descriptor {syscall('perf_event_open', event, -1, 0, -1, 0)}"


@ATTACKS.inside
def measures_itself(given: Given) -> str | None:
    """A counter of this process alone, the kernel's part left out."""
    event = ctypes.create_string_buffer(112)
    event[0:8] = (1).to_bytes(4, "little") + (112).to_bytes(4, "little")
    event[40:48] = (0b1100000).to_bytes(8, "little")
    return f"descriptor {syscall('perf_event_open', event, 0, -1, -1, 0)}"


@ATTACKS.inside
def watches_all_files(given: Given) -> str | None:
    return f"descriptor {syscall('fanotify_init', 0, 0)}"


@ATTACKS.inside
def opens_a_socket_to_the_virtual_machines_host(given: Given) -> str | None:
    with socket.socket(getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM):
        return "AF_VSOCK is open"


@ATTACKS.inside
def opens_a_socket_of_packets_to_the_virtual_machines_host(given: Given) -> str | None:
    with socket.socket(getattr(socket, "AF_VSOCK", 40), socket.SOCK_SEQPACKET):
        return "AF_VSOCK is open"


@ATTACKS.inside
def opens_a_socket_of_raw_packets(given: Given) -> str | None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300):
        return "AF_PACKET is open"


@ATTACKS.inside
def opens_a_socket_of_cooked_packets(given: Given) -> str | None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0x0300):
        return "AF_PACKET is open"


@ATTACKS.inside
def opens_a_raw_socket(given: Given) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP):
        return "SOCK_RAW is open"


@ATTACKS.inside
def opens_a_raw_socket_of_version_6(given: Given) -> str | None:
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58):
        return "SOCK_RAW is open"


@ATTACKS.inside
def makes_a_network_device(given: Given) -> str | None:
    """Asked of the kernel for a kind of device that there is not."""
    kind = struct.pack("=HH8s", 12, 1, b"nowhere\0")
    linked = struct.pack("=HH", 4 + len(kind), 18) + kind
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + linked
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), 16, 0x0001 | 0x0004 | 0x0600, 1, 0) + body)
        code = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]
    return None if code in (errno.EPERM, errno.EACCES) else f"netlink answered {errno.errorcode.get(code, code)}"


@ATTACKS.inside
def adds_a_route(given: Given) -> str | None:
    """To nowhere: a message without a target, which only a permitted caller hears more of."""
    body = struct.pack("=BBBBBBBBI", 2, 77, 0, 0, 254, 4, 0, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), 24, 0x0001 | 0x0004, 1, 0) + body)
        code = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]
    return None if code in (errno.EPERM, errno.EACCES) else f"netlink answered {errno.errorcode.get(code, code)}"


@ATTACKS.inside
def makes_a_tunnel(given: Given) -> str | None:
    os.close(os.open("/dev/net/tun", os.O_RDWR))
    return "/dev/net/tun can be opened"


@ATTACKS.inside
def mounts_from_user_space(given: Given) -> str | None:
    os.close(os.open("/dev/fuse", os.O_RDWR))
    return "/dev/fuse can be opened"


@ATTACKS.inside
def sees_where_the_kernel_lies(given: Given) -> str | None:
    addresses = [line.split()[0] for line in contents("/proc/kallsyms").decode().splitlines()[:100]]
    return "/proc/kallsyms shows addresses" if any(int(address, 16) for address in addresses) else None


@ATTACKS.inside
def reads_the_maps_of_the_machines_memory(given: Given) -> str | None:
    lines = contents("/proc/iomem").decode().splitlines()
    shown = any(int(line.split("-")[0], 16) for line in lines if "-" in line)
    return "/proc/iomem shows addresses" if shown else None


@ATTACKS.inside
def reads_the_kernels_tables_of_pages(given: Given) -> str | None:
    for path in ("/proc/kpageflags", "/proc/kpagecount", "/proc/kcore"):
        if os.path.exists(path):
            with open(path, "rb", buffering=0) as file:
                return f"{path} was read" if file.read(8) else None
    return None


@ATTACKS.inside
def reads_the_kernels_lists_of_its_caches(given: Given) -> str | None:
    return "/proc/slabinfo was read" if contents("/proc/slabinfo") else None


@ATTACKS.inside
def reads_timers_and_schedules_of_all(given: Given) -> str | None:
    return "/proc/timer_list was read" if contents("/proc/timer_list") else None


@ATTACKS.inside
def reads_the_messages_of_the_kernel(given: Given) -> str | None:
    return "/dev/kmsg was read" if contents("/dev/kmsg") else None
