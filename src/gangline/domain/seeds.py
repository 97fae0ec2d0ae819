"""Seeds derived from another seed: the same in every process and version of Python."""

from __future__ import annotations

import hashlib


def derived_seed(*path: int) -> int:
    """Returns a distinct seed for each path of whole numbers, such as (seed, number of the task): from 0 to 2^63 -
    1."""
    digest = hashlib.sha256("/".join(map(str, path)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
