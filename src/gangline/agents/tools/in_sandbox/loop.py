"""An event loop on `poll`: descriptors, timers and child exits. asyncio would take 60 ms to import."""

from __future__ import annotations

import itertools
import os
import select
import time

try:
    from _heapq import heappop, heappush
except ImportError:  # another Python than CPython
    from heapq import heappop, heappush

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any, Callable

_READ = select.POLLIN | select.POLLHUP | select.POLLERR


class Timer:
    """A callback scheduled for a time, unless cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Calls back when a descriptor is readable or writable, and when a timer is due."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._is_over = False

    def read(self, fd: int, call: Callable[[], None] | None) -> None:
        """Call whenever `fd` is readable or at its end; None removes the callback."""
        self._set(self._readers, fd, call)

    def write(self, fd: int, call: Callable[[], None] | None) -> None:
        """Call whenever `fd` is writable; None removes the callback."""
        self._set(self._writers, fd, call)

    def _set(self, calls: dict[int, Any], fd: int, call: Callable[[], None] | None) -> None:
        if call is not None:
            calls[fd] = call
        else:
            calls.pop(fd, None)
        events = (_READ if fd in self._readers else 0) | (select.POLLOUT if fd in self._writers else 0)
        if events:
            self._poll.register(fd, events)
        elif call is None:
            try:
                self._poll.unregister(fd)
            except KeyError:
                pass

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heappush(self._timers, (time.monotonic() + delay_s, next(self._count), timer))
        return timer

    def stop(self) -> None:
        self._is_over = True

    def run(self) -> None:
        while not self._is_over:
            self._turn()

    def _turn(self) -> None:
        for fd, events in self._poll.poll(self._pause_ms()):
            reader, writer = self._readers.get(fd), self._writers.get(fd)
            if events & _READ and reader is not None:
                reader()
            elif events & ~_READ and writer is not None:
                writer()
        while self._timers and (self._timers[0][2].is_cancelled or self._timers[0][0] <= time.monotonic()):
            timer = heappop(self._timers)[2]
            if not timer.is_cancelled:
                timer.call()

    def _pause_ms(self) -> float | None:
        while self._timers and self._timers[0][2].is_cancelled:
            heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, 1000 * (self._timers[0][0] - time.monotonic()) + 0.5)


class Lines:
    """Lines over a stream socket, in both directions. A line is JSON, so it contains no line break."""

    def __init__(
        self, loop: Loop, fd: int, on_line: Callable[[bytes], None], on_end: Callable[[], None], max_bytes: int
    ) -> None:
        """A line longer than `max_bytes` is dropped, and `on_line` gets an empty one instead."""
        self.fd = fd
        self._loop = loop
        self._on_line = on_line
        self._on_end = on_end
        self._max_bytes = max_bytes
        self._in = bytearray()
        self._searched = 0
        self._skipping = False
        self._out = bytearray()
        os.set_blocking(fd, False)
        loop.read(fd, self._readable)

    def send(self, data: bytes) -> None:
        """Send lines, each including its line end."""
        self._out += data
        self._writable()

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.read(self.fd, None)
            self._loop.write(self.fd, None)
            os.close(self.fd)
            self.fd = -1

    def _writable(self) -> None:
        """Send as much as possible. Reading stops while the peer does not read our answers."""
        if self.fd < 0:
            return
        try:
            del self._out[: os.write(self.fd, self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()
        if self.fd >= 0:
            self._loop.read(self.fd, None if self._out else self._readable)
            self._loop.write(self.fd, self._writable if self._out else None)

    def _readable(self) -> None:
        try:
            piece = os.read(self.fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            self._on_end()
            return
        self._in += piece
        while self.fd >= 0:
            end = self._in.find(b"\n", self._searched)
            if end < 0:
                break
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._searched = 0
            is_whole = not self._skipping and len(line) <= self._max_bytes
            self._skipping = False
            self._on_line(line if is_whole else b"")
        self._searched = len(self._in)
        if self._searched > self._max_bytes:
            self._in.clear()
            self._searched = 0
            self._skipping = True
