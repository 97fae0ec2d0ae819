"""The forward proxy of network `list`: ways to make it dial hosts that are not on the list, or that no list may mean.

The list has the victim's port of `localhost`, but no address: a name alone must not lead to an address that is not
public.
"""

from __future__ import annotations

from support.hostility.attack import Attacks
from support.hostility.kit import Given, asked_of_proxy, fetched, tunnelled

ATTACKS = Attacks("hosts that the network list does not name")


@ATTACKS.listed
def fetches_from_the_loopback(given: Given) -> str | None:
    return fetched(given, "http://127.0.0.1:PORT/")


@ATTACKS.listed
def fetches_from_localhost(given: Given) -> str | None:
    return fetched(given, "http://localhost:PORT/")


@ATTACKS.listed
def fetches_from_localhost_with_a_dot(given: Given) -> str | None:
    return fetched(given, "http://localhost.:PORT/")


@ATTACKS.listed
def fetches_from_localhost_in_capitals(given: Given) -> str | None:
    return fetched(given, "http://LOCALHOST:PORT/")


@ATTACKS.listed
def fetches_from_a_decimal_address(given: Given) -> str | None:
    return fetched(given, "http://2130706433:PORT/")


@ATTACKS.listed
def fetches_from_an_octal_address(given: Given) -> str | None:
    return fetched(given, "http://0177.0.0.1:PORT/")


@ATTACKS.listed
def fetches_from_a_hexadecimal_address(given: Given) -> str | None:
    return fetched(given, "http://0x7f000001:PORT/")


@ATTACKS.listed
def fetches_from_a_short_address(given: Given) -> str | None:
    return fetched(given, "http://127.1:PORT/")


@ATTACKS.listed
def fetches_from_the_address_of_nobody(given: Given) -> str | None:
    return fetched(given, "http://0.0.0.0:PORT/")


@ATTACKS.listed
def fetches_from_a_mapped_address(given: Given) -> str | None:
    return fetched(given, "http://[::ffff:127.0.0.1]:PORT/")


@ATTACKS.listed
def fetches_from_the_loopback_behind_a_listed_user(given: Given) -> str | None:
    return fetched(given, "http://localhost:9@127.0.0.1:PORT/")


@ATTACKS.listed
def fetches_the_metadata_of_the_cloud(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://169.254.169.254/latest/meta-data/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_by_a_decimal_address(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://2852039166/latest/meta-data/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_by_a_mapped_address(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://[::ffff:169.254.169.254]/latest/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_by_a_translated_address(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://[64:ff9b::a9fe:a9fe]/latest/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_by_version_6(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://[fd00:ec2::254]/latest/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_of_azure(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://168.63.129.16/machine/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_of_oracle(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://192.0.0.192/latest/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_the_metadata_of_alibaba(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://100.100.100.200/latest/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_from_a_private_network(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://10.0.0.1/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def fetches_from_a_site_local_network(given: Given) -> str | None:
    return asked_of_proxy(b"GET http://[fec0::1]/ HTTP/1.1\r\nHost: localhost:9\r\n\r\n")


@ATTACKS.listed
def tunnels_to_the_loopback(given: Given) -> str | None:
    return tunnelled(given, "127.0.0.1:PORT")


@ATTACKS.listed
def tunnels_to_localhost(given: Given) -> str | None:
    return tunnelled(given, "localhost:PORT")


@ATTACKS.listed
def tunnels_to_the_metadata_of_the_cloud(given: Given) -> str | None:
    return tunnelled(given, "169.254.169.254:80")


@ATTACKS.listed
def tunnels_to_a_decimal_address(given: Given) -> str | None:
    return tunnelled(given, "2130706433:PORT")


@ATTACKS.listed
def tunnels_to_a_mapped_address(given: Given) -> str | None:
    return tunnelled(given, "[::ffff:127.0.0.1]:PORT")


@ATTACKS.listed
def tunnels_in_small_letters(given: Given) -> str | None:
    port = given["victim"]["tcp"]
    request = f"connect 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode()
    return asked_of_proxy(request, b"GET / HTTP/1.1\r\n\r\n")


@ATTACKS.listed
def fetches_without_a_host(given: Given) -> str | None:
    port = given["victim"]["tcp"]
    return asked_of_proxy(f"GET http://127.0.0.1:{port}/ HTTP/1.0\r\n\r\n".encode())


@ATTACKS.listed
def fetches_by_another_method(given: Given) -> str | None:
    port = given["victim"]["tcp"]
    url = f"http://127.0.0.1:{port}/"
    return asked_of_proxy(f"GET {url} HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: CONNECT\r\n\r\n".encode())


@ATTACKS.listed
def names_two_lengths_of_a_body(given: Given) -> str | None:
    """The bytes after the shorter one would be its own request."""
    port = given["victim"]["tcp"]
    url = f"http://127.0.0.1:{port}/"
    head = f"GET {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n"
    return asked_of_proxy(head.encode())


@ATTACKS.listed
def names_a_length_and_chunks(given: Given) -> str | None:
    port = given["victim"]["tcp"]
    url = f"http://127.0.0.1:{port}/"
    head = f"GET {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    return asked_of_proxy(head.encode())
