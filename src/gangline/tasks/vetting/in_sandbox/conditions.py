"""`sitecustomize` of a grader's Python: another day, and tests in reverse order."""

import datetime
import os
import time
from typing import Any, Optional

SHIFT_S = 400 * 86400
REAL, REAL_DAY = datetime.datetime, datetime.date
NOW, NOW_NS, LOCAL, UTC, TEXT, FORMAT = (
    time.time,
    time.time_ns,
    time.localtime,
    time.gmtime,
    time.ctime,
    time.strftime,
)


class Pretender(type):
    """Instances of the real class also count as instances."""

    real: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, cls.real)


class Moment(REAL, metaclass=Pretender):
    real = REAL

    @classmethod
    def now(cls, tz: Optional[datetime.tzinfo] = None) -> Any:
        return REAL.now(tz) + datetime.timedelta(seconds=SHIFT_S)

    @classmethod
    def utcnow(cls) -> Any:
        return REAL.fromtimestamp(NOW() + SHIFT_S, datetime.timezone.utc).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


class Day(REAL_DAY, metaclass=Pretender):
    real = REAL_DAY

    @classmethod
    def today(cls) -> Any:
        return REAL_DAY.today() + datetime.timedelta(seconds=SHIFT_S)


def shift_clock() -> None:
    def localtime(seconds: Optional[float] = None) -> time.struct_time:
        return LOCAL(NOW() + SHIFT_S if seconds is None else seconds)

    def gmtime(seconds: Optional[float] = None) -> time.struct_time:
        return UTC(NOW() + SHIFT_S if seconds is None else seconds)

    def ctime(seconds: Optional[float] = None) -> str:
        return TEXT(NOW() + SHIFT_S if seconds is None else seconds)

    def strftime(format: str, when: Any = None) -> str:
        return FORMAT(format, localtime() if when is None else when)

    time.time = lambda: NOW() + SHIFT_S
    time.time_ns = lambda: NOW_NS() + SHIFT_S * 10**9
    time.localtime, time.gmtime, time.ctime, time.strftime = localtime, gmtime, ctime, strftime
    datetime.datetime, datetime.date = Moment, Day  # type: ignore[misc]


def reverse_tests() -> None:
    import unittest

    def after(one: str, other: str) -> int:
        return (one < other) - (one > other)

    unittest.TestLoader.sortTestMethodsUsing = staticmethod(after)


if os.environ.get("GANGLINE_VET_CLOCK"):
    shift_clock()
if os.environ.get("GANGLINE_VET_ORDER"):
    reverse_tests()
