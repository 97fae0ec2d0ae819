"""Kernel keyrings: they belong to processes and users, and no namespace but that of users parts them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from support.hostility.attack import Attacks
from support.hostility.kit import Absent, Given, key_found, syscall

ATTACKS = Attacks("keys in the kernel")

# Of `keyctl`: 0 id of a keyring, 1 join a session keyring, 8 link, 10 search, 11 read, 18 give to the parent.


@ATTACKS.against_both
def searches_the_session_keyring(given: Given) -> str | None:
    return key_found(given, "session")


@ATTACKS.against_both
def searches_the_keyring_of_its_user(given: Given) -> str | None:
    return key_found(given, "user")


@ATTACKS.against_both
def searches_the_session_keyring_of_its_user(given: Given) -> str | None:
    return key_found(given, "user_session")


@ATTACKS.against_both
def reads_keys_by_their_serial_numbers(given: Given) -> str | None:
    victim = given["victim"]
    for serial in victim["keys"].values():
        payload = ctypes.create_string_buffer(256)
        with contextlib.suppress(OSError):
            syscall("keyctl", 11, serial, payload, 256)
            if payload.value.decode() == victim["secret"]:
                return f"key {serial} has the secret"
    return None


@ATTACKS.against_both
def sees_keys_in_the_kernels_list(given: Given) -> str | None:
    if not given["victim"]["keys"]:
        raise Absent("the victim could not add a key")
    with open("/proc/keys") as file:
        return "/proc/keys names its keys" if given["victim"]["name"] in file.read() else None


@ATTACKS.against_both
def asks_the_kernel_to_find_a_key(given: Given) -> str | None:
    victim = given["victim"]
    if "session" not in victim["keys"]:
        raise Absent("the victim could not add a key")
    serial = syscall("request_key", b"user", f"{victim['name']}-session".encode(), None, -3)
    return f"it is key {serial}" if serial in victim["keys"].values() else None


@ATTACKS.against_both
def writes_keys_by_their_serial_numbers(given: Given) -> str | None:
    """The same content here; but a key that can be written is a channel between two sandboxes."""
    victim = given["victim"]
    for serial in victim["keys"].values():
        with contextlib.suppress(OSError):
            secret = victim["secret"].encode()
            syscall("keyctl", 2, serial, secret, len(secret))
            return f"key {serial} was written"
    return None


@ATTACKS.inside
def adds_keys_at_all(given: Given) -> str | None:
    """Keys count against quotas of a user and outlive processes; no agent needs them."""
    serial = syscall("add_key", b"user", b"gangline-left-behind", b"x", 1, -3)
    syscall("keyctl", 21, serial)
    return f"key {serial} was added"


@ATTACKS.inside
def joins_a_session_keyring_by_name(given: Given) -> str | None:
    return f"joined {syscall('keyctl', 1, b'gangline-shared')}"


@ATTACKS.inside
def gives_its_session_keyring_to_its_parent(given: Given) -> str | None:
    """Here to its own process: the call as such has no business in a sandbox."""
    if (pid := os.fork()) == 0:
        try:
            syscall("keyctl", 18)
        except OSError as error:
            os._exit(1 if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES) else 0)
        os._exit(0)
    return "the kernel went along" if os.waitpid(pid, 0)[1] == 0 else None


@ATTACKS.inside
def opens_the_persistent_keyring_of_a_user(given: Given) -> str | None:
    return f"it is {syscall('keyctl', 22, -1, -3)}"
