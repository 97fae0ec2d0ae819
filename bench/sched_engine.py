"""A model of an engine with a prefix cache, as vLLM's scheduler works: continuous batching in steps, chunked prefill,
blocks that are evicted in the order in which they were last used, and preemption when none is left.

It counts tokens and seconds, and samples nothing. Times are those of the `Speed` that it is given.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[str, int]
"""(name of a text, number of a block in it)"""


@dataclass(frozen=True)
class Speed:
    step_s: float
    """Of a step, whatever it computes."""
    prefill_s: float
    """For each token of a prompt."""
    decode_s: float
    """For each sequence that samples a token."""
    max_step_tokens: int = 2048
    max_num_seqs: int = 256


@dataclass(eq=False)
class Call:
    """One call in the engine. The prompt is the group's shared text, then the session's own."""

    session: str
    group: str
    num_shared: int
    num_prompt: int
    num_sampled: int
    done: int = 0
    """Tokens whose keys and values are in the cache."""
    num_cached: int = 0
    """Tokens of the prompt that were in the cache when it was first scheduled."""
    is_scheduled: bool = False
    blocks: list[Key] = field(default_factory=list[Key])

    @property
    def total(self) -> int:
        return self.num_prompt + self.num_sampled


class EngineModel:
    def __init__(self, capacity: int, speed: Speed, block: int = 16) -> None:
        """capacity: tokens."""
        self.speed = speed
        self.block = block
        self.num_free = capacity // block
        """Blocks that hold nothing."""
        self.capacity = self.num_free * block
        self._in_use = dict[Key, int]()
        self._free = OrderedDict[Key, None]()
        """Blocks without a user, whose content may be used again; the first is evicted first."""
        self.waiting = deque[Call]()
        self.running: list[Call] = []
        self.num_queried = self.num_hit = self.num_computed = self.num_preempted = 0

    def ask(self, call: Call) -> None:
        self.waiting.append(call)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> tuple[float, list[Call]]:
        """Returns its seconds and the calls that ended with it."""
        budget = self.speed.max_step_tokens
        num_prefilled = num_decoded = 0
        at = 0
        while at < len(self.running) and budget > 0:
            call = self.running[at]
            wanted = min(budget, max(call.num_prompt - call.done, 1))
            if not self._grow(call, call.done + wanted):
                if self.running[-1] is call:
                    self._preempt()
                    break
                self._preempt()
                continue
            if call.done < call.num_prompt:
                num_prefilled += wanted
            else:
                num_decoded += 1
            call.done += wanted
            budget -= wanted
            at += 1
        while self.waiting and budget > 0 and len(self.running) < self.speed.max_num_seqs and at == len(self.running):
            call = self.waiting[0]
            num_hit = self._hits(call)
            wanted = min(budget, call.num_prompt - num_hit)
            if not self._grow(call, num_hit + wanted):
                self._release(call)
                break
            self.waiting.popleft()
            if not call.is_scheduled:
                call.is_scheduled, call.num_cached = True, num_hit
                self.num_queried += call.num_prompt
                self.num_hit += num_hit
            call.done = num_hit + wanted
            num_prefilled += wanted
            budget -= wanted
            self.running.append(call)
            at += 1
        self.num_computed += num_prefilled
        ended = [call for call in self.running if call.done >= call.total]
        for call in ended:
            self.running.remove(call)
            self._release(call)
        speed = self.speed
        return speed.step_s + num_prefilled * speed.prefill_s + num_decoded * speed.decode_s, ended

    def _key(self, call: Call, number: int) -> Key:
        return (call.group if (number + 1) * self.block <= call.num_shared else call.session, number)

    def _hits(self, call: Call) -> int:
        """Takes the blocks of the prompt that are cached, and returns their tokens; at least one is computed."""
        for number in range((call.num_prompt - 1) // self.block):
            key = self._key(call, number)
            if key not in self._in_use and key not in self._free:
                break
            self._use(call, key)
        return len(call.blocks) * self.block

    def _use(self, call: Call, key: Key) -> None:
        self._free.pop(key, None)
        self._in_use[key] = self._in_use.get(key, 0) + 1
        call.blocks.append(key)

    def _grow(self, call: Call, num_tokens: int) -> bool:
        """Give the call blocks for so many tokens. Returns whether there were enough."""
        for number in range(len(call.blocks), -(-num_tokens // self.block)):
            key = self._key(call, number)
            if key not in self._in_use and key not in self._free:
                if self.num_free > 0:
                    self.num_free -= 1
                elif self._free:
                    self._free.popitem(last=False)
                else:
                    return False
            self._use(call, key)
        return True

    def _release(self, call: Call) -> None:
        for key in reversed(call.blocks):
            self._in_use[key] -= 1
            if self._in_use[key] == 0:
                del self._in_use[key]
                self._free[key] = None
        call.blocks = []

    def _preempt(self) -> None:
        call = self.running.pop()
        self._release(call)
        call.num_sampled -= max(call.done - call.num_prompt, 0)
        call.num_prompt = max(call.done, call.num_prompt)
        call.done = 0
        self.num_preempted += 1
        self.waiting.appendleft(call)


def hit_rate(engines: Sequence[EngineModel]) -> float:
    queried = sum(one.num_queried for one in engines)
    return sum(one.num_hit for one in engines) / queried if queried else 0.0
