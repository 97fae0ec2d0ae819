"""What a control grades: files that this grader has graded before; else nothing, and stand-ins for a solution.

Most graders import or open the solution, and fail where there is none, as they do where it is wrong in its syntax.
A control with nothing would call them broken. Either of these shows that they work.
"""

from __future__ import annotations

from collections.abc import Iterable

from gangline.domain.contracts import RuntimeHandle
from gangline.domain.errors import GanglineError
from gangline.grading.script.collecting import Archive, Collected
from gangline.grading.untrusted.graded_before import MAX_BYTES

__all__ = ["stand_ins", "working_folder"]

_TAR_TIMEOUT_S = 60.0
_TAR = 'tar -cf - --exclude=./.gangline . | head -c "$1"'

_MODULE = b"""
def _itself(*_args, **_kwargs):
    return _thing

class _Thing:
    __call__ = __getitem__ = __enter__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _itself
    __neg__ = __pos__ = __abs__ = __round__ = __await__ = _itself
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, _other: False
    __ne__ = lambda self, _other: True
    __bool__ = lambda self: False
    __int__ = __index__ = __len__ = __hash__ = lambda self: 0
    __float__ = lambda self: 0.0
    __str__ = __repr__ = lambda self: ""
    __iter__ = lambda self: iter(())
    __exit__ = lambda self, *_error: None

    def __getattr__(self, name):
        return __getattr__(name)

_thing = _Thing()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _thing
"""
"""A module that has every name and gets every answer wrong."""


def stand_ins(paths: Iterable[str]) -> Collected:
    """Files for `paths` that can be read as what their names say, and solve nothing."""
    kinds = {".py": _MODULE, ".json": b"{}"}
    return Collected(files={path: kinds.get(path[path.rfind(".") :], b"") for path in paths})


async def working_folder(runtime: RuntimeHandle) -> Collected | None:
    """None where it is too large to be remembered, or cannot be read."""
    command = ["sh", "-c", _TAR, "sh", str(MAX_BYTES)]
    try:
        taken = await runtime.exec(command, timeout_s=_TAR_TIMEOUT_S, max_output_bytes=MAX_BYTES)
    except GanglineError:
        return None
    is_whole = taken.ok and 0 < len(taken.stdout) < MAX_BYTES
    return Collected(archives={".": Archive(taken.stdout, ".")}) if is_whole else None
