"""Everything that is reached over a network: services of the host, of other sandboxes, of the cloud around them.

An outside address is never sent anything: connecting a datagram socket only asks the kernel for a route.
"""

from __future__ import annotations

import socket

from support.hostility.attack import Attacks
from support.hostility.grounds import Grounds
from support.hostility.kit import Absent, Given, contents, said_by, way_to

ATTACKS = Attacks("services on networks")


@ATTACKS.against_both
def dials_a_port_of_the_loopback(given: Given) -> str | None:
    answer = said_by(("127.0.0.1", given["victim"]["tcp"]), socket.AF_INET)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def dials_a_port_of_the_loopback_of_version_6(given: Given) -> str | None:
    if given["victim"]["tcp6"] is None:
        raise Absent("the victim has no IPv6")
    answer = said_by(("::1", given["victim"]["tcp6"]), socket.AF_INET6)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def dials_a_mapped_address(given: Given) -> str | None:
    answer = said_by(("::ffff:127.0.0.1", given["victim"]["tcp"]), socket.AF_INET6)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def dials_another_address_of_the_loopback(given: Given) -> str | None:
    answer = said_by(("127.8.9.10", given["victim"]["tcp_any"]), socket.AF_INET)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def dials_the_address_of_nobody(given: Given) -> str | None:
    answer = said_by(("0.0.0.0", given["victim"]["tcp"]), socket.AF_INET)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def sends_datagrams_to_the_loopback(given: Given) -> str | None:
    answer = said_by(("127.0.0.1", given["victim"]["udp"]), socket.AF_INET, socket.SOCK_DGRAM)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.around()
async def dials_the_hosts_own_address(grounds: Grounds) -> str | None:
    """The one by which the host goes out; found by a route, not by a packet."""

    def dials(given: Given) -> str | None:
        answer = said_by((given["address"], given["victim"]["tcp_any"]), socket.AF_INET)
        return f"it answered {answer[:80]!r}" if given["secret"].encode() in answer else None

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError as error:
            raise Absent("the host has no way out") from error
        return await grounds.run_inside(dials, address=asking.getsockname()[0])


@ATTACKS.against_both
def sees_open_ports_in_the_kernels_list(given: Given) -> str | None:
    port = f":{given['victim']['tcp']:04X} ".encode()
    return "/proc/net/tcp shows its port" if port in contents("/proc/net/tcp") else None


@ATTACKS.inside
def has_a_way_to_the_clouds_metadata(given: Given) -> str | None:
    return way_to("169.254.169.254", 80)


@ATTACKS.inside
def has_a_way_to_the_metadata_of_azure(given: Given) -> str | None:
    return way_to("168.63.129.16", 80)


@ATTACKS.inside
def has_a_way_to_private_networks(given: Given) -> str | None:
    return way_to("10.0.0.1", 80)


@ATTACKS.inside
def has_a_way_to_the_outside(given: Given) -> str | None:
    return way_to("192.0.2.1", 53)


@ATTACKS.inside
def has_devices_of_a_network(given: Given) -> str | None:
    lines = contents("/proc/net/dev").decode().splitlines()[2:]
    names = [line.split(":")[0].strip() for line in lines]
    outside = [
        name for name in names if name != "lo" and not name.startswith(("tunl", "sit", "ip6tnl", "gre", "erspan"))
    ]
    return f"devices {outside}" if outside else None


@ATTACKS.inside
def announces_to_its_neighbours(given: Given) -> str | None:
    """A way to everyone on the link."""
    return way_to("224.0.0.251", 5353)


@ATTACKS.inside
def broadcasts(given: Given) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        asking.connect(("255.255.255.255", 9))
        return f"a route from {asking.getsockname()[0]}"
