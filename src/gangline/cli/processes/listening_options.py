"""Options shared by the serving commands: their addresses and access keys."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gangline.domain.errors import InvalidRequest
from gangline.wire.http.same_origin import is_loopback

HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
KeyEnvOption = Annotated[
    str | None, typer.Option("--key-env", help="Variable with the key that clients send as a bearer token.")
]
AllowedHostOption = Annotated[
    list[str] | None, typer.Option("--allowed-host", help="Another name under which clients reach it.")
]


def read_key(variable: str | None, host: str) -> str | None:
    """The key of `--key-env`. Raises: InvalidRequest when it is not set, or a public address has no key."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise InvalidRequest(f"--key-env {variable}: the variable is not set.")
    if key is None and not is_loopback(host):
        raise InvalidRequest(
            f"{host} can be reached from elsewhere, and no key is set: anyone could run commands in your sandboxes. "
            "Give --key-env NAME, or listen on 127.0.0.1."
        )
    return key


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
