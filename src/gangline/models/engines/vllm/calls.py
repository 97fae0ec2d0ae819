"""Assigns pieces of tool calls in a chat stream to numbered calls, whatever a server's conventions. Pure.

OpenAI gives each call an index, and sends its id and its name once, in its first piece. Servers also repeat id and
name, leave out indexes or ids, give parallel calls one index, and restart or skip indexes. A new id is a new call. A
repeated name without a new id begins a call only if the one before is complete. Ambiguous pieces are refused: two calls
must never become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from gangline.domain.errors import EngineMalformed
from gangline.domain.reply import ToolCallDelta
from gangline.models.engines.replies import WireToolCall, function_of


class _Call(msgspec.Struct, gc=False):
    number: int
    index: int | None
    call_id: str = ""
    name: str = ""
    arguments: list[str] = []

    @property
    def is_whole(self) -> bool:
        try:
            msgspec.json.decode("".join(self.arguments), type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError):
            return False
        return True


class StreamedCalls:
    """The calls of one choice, numbered from 0 in the order in which they begin."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._at: dict[int | None, _Call] = {}
        """Index -> the last call that began there; None -> the last of all."""
        self._by_id: dict[str, _Call] = {}

    def feed(self, pieces: Sequence[WireToolCall]) -> list[ToolCallDelta]:
        """One chunk's list. Pieces of a call without a name wait for the name. Raises: EngineMalformed."""
        num_before, found = len(self._calls), list[ToolCallDelta]()
        if num_before > 1 and sum(map(_is_unmarked, pieces)) > 1:
            raise EngineMalformed("the engine's stream has pieces of several tool calls without an id or an index")
        for piece in pieces:
            name, arguments = function_of(piece)
            if not (piece.id or name or arguments):
                continue
            call = self._continued(piece, name, arguments, num_before) or self._begun(piece)
            call.arguments.append(arguments)
            if name and not call.name:
                call.name = name
                found.append(ToolCallDelta(call.number, "".join(call.arguments), call.call_id or None, name))
            elif arguments and call.name:
                found.append(ToolCallDelta(call.number, arguments))
        return found

    def finish(self) -> None:
        """Raises: EngineMalformed for a call that never got a name."""
        if not all(call.name for call in self._calls):
            raise EngineMalformed("the engine's stream has a tool call without a name")

    def _continued(self, piece: WireToolCall, name: str, arguments: str, num_before: int) -> _Call | None:
        """The call that a piece continues; None if it begins a new one."""
        call = self._by_id.get(piece.id or "") or self._at.get(piece.index)
        if call is None and not (piece.id or name):
            call = self._last_without_index()
        if call is None or _is_another(call, piece, name, arguments, in_one_list=call.number >= num_before):
            return None
        if name and call.name and (name != call.name or (not piece.id and call.is_whole)):
            raise EngineMalformed(
                f"the engine's stream names a tool call {call.name!r} and then {name!r}: without an id or an index of "
                "its own, a second call cannot be told from the first"
            )
        if piece.id and not call.call_id:
            call.call_id = piece.id
            self._by_id[piece.id] = call
        return call

    def _last_without_index(self) -> _Call | None:
        """For later pieces of a call that have an index though its first piece had none."""
        last = self._at.get(None)
        return last if last is not None and last.index is None else None

    def _begun(self, piece: WireToolCall) -> _Call:
        call = _Call(len(self._calls), piece.index, piece.id or "", "", [])
        self._calls.append(call)
        self._at[piece.index] = self._at[None] = call
        if piece.id:
            self._by_id[piece.id] = call
        return call


def _is_unmarked(piece: WireToolCall) -> bool:
    name, arguments = function_of(piece)
    return piece.index is None and not (piece.id or name) and bool(arguments)


def _is_another(call: _Call, piece: WireToolCall, name: str, arguments: str, *, in_one_list: bool) -> bool:
    """Whether a piece with the id or index of `call` begins a new call."""
    is_renamed = bool(name and call.name and name != call.name)
    if piece.id and piece.id == call.call_id:  # some servers give every call the same id
        if not name or (piece.index == call.index and piece.index is not None):
            return False
        return is_renamed or (call.is_whole and (piece.index is not None or bool(arguments)))
    if piece.id and call.call_id:
        return True
    if not (name and call.name):
        return False
    if piece.id:
        return is_renamed or call.is_whole
    return (in_one_list and piece.index is None) or (call.is_whole and (is_renamed or bool(arguments)))


class CallsOfChoices(defaultdict[int, StreamedCalls]):
    """Choice -> its calls."""

    def __init__(self) -> None:
        super().__init__(StreamedCalls)

    def finish(self) -> None:
        """Raises: EngineMalformed."""
        for calls in self.values():
            calls.finish()
