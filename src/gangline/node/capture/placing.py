"""The place of a call in its session: the completion whose context it continues, and the messages since then.

Histories are compared by meaning, not by bytes (see `meaning`). Record keys that harnesses echo (tool-call ids,
signatures of thinking) decide between equals. Each prefix of a history that ends with a sampled turn has a rolling
digest, so placing costs one pass over the request, however many completions there are. If a request continues an
earlier one word by word, only its new part is digested. The deepest match wins; unsampled content (an edited turn, a
compaction) counts as new.

A call that echoes sampled turns after its match, or has another turn instead of a sampled one, would have
continued an earlier call had its client not changed earlier content. Its lineage names that call and the client's
change, which affects no ids. The origin is found from the end of the history, by the strongest evidence first: the same
conversation in another branch or under another system text; a record key; the turn itself; the prompt before a turn
that was replaced.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from gangline.domain.completion import Completion, CompletionTree, DivergenceCause, Lineage
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ThinkingWish, ToolCall
from gangline.machine.event_loop import Turn
from gangline.node.capture.meaning import VolatileText, calls_of, is_echo, normal_form, said_by

_MAX_WALKS = 3
"""Most conversations that can alternate without being digested again."""

_TURN_MESSAGES = 256
"""Messages digested before other sessions get their turn."""

_MAX_ECHO_CHARS = 64 << 10
"""A longer assistant message, including its arguments, is compared only as it is."""

Digests = Callable[[Message], bytes | None]
"""Known digests of messages' meanings."""

_TELLING_CHARS = 24
"""A reply with this much text, or with a tool call, is assumed not to occur twice by chance."""


class HistoryDigest(NamedTuple):
    """Rolling digests of a whole history."""

    strict: bytes
    """Equal for equal prompts."""
    loose: bytes
    """Digest without branch key and system messages. Empty: there is nothing else."""


class Step(NamedTuple):
    """One message of a history."""

    meaning: bytes
    """Digest of the message alone."""
    digest: HistoryDigest
    """Digest of the history up to and including this message."""
    owners: tuple[str, ...]
    """The completions that the message names by their record keys."""


class LineageIndex:
    """Finds the call that a changed call would have continued, among the completions of one session."""

    def __init__(self, tree: CompletionTree, meaning_of: Callable[[Message], bytes]) -> None:
        self._tree = tree
        self._meaning_of = meaning_of
        self._by_end: dict[bytes, str] = {}
        """loose digest of history and response -> the latest completion"""
        self._by_prompt: dict[bytes, str] = {}
        """Likewise, of the history alone. Includes aborted calls."""
        self._by_response: dict[bytes, list[str]] = {}
        self._meanings: dict[Message, bytes] = {}
        """Meanings of recorded messages compared so far: a client that changes a message does so in every call."""

    def add_prompt(self, completion: Completion, history: HistoryDigest) -> None:
        if history.loose:
            self._by_prompt[history.loose] = completion.completion_id

    def add_response(self, completion: Completion, step: Step) -> None:
        """`step`: the response, after its history."""
        self._by_end[step.digest.loose] = completion.completion_id
        self._by_response.setdefault(step.meaning, []).append(completion.completion_id)

    def lineage(self, key: str, call: ModelCall, steps: Sequence[Step], num_shared: int) -> Lineage | None:
        """Returns the call that this one would have continued; None if it echoes only turns that it continues.

        steps: of each message of the call. num_shared: messages that the call has in common with its parent.
        """
        # A final assistant turn is not an echo: the client begins the reply itself.
        for position in range(len(steps) - 2, num_shared - 1, -1):
            if call.messages[position].role != "assistant":
                continue
            origin_id = self._find(call.messages[position], steps, position)
            if origin_id is not None:
                cause, first_change = self._cause(key, call, steps, self._tree[origin_id])
                return Lineage(relation="changed", origin_id=origin_id, cause=cause, first_change=first_change)
        return None

    def _find(self, echo: Message, steps: Sequence[Step], position: int) -> str | None:
        """Returns the completion whose response is at `position`, or was there before the client replaced it."""
        step, before = steps[position], steps[position - 1] if position else None
        if (alike := self._by_end.get(step.digest.loose)) is not None:
            return alike
        if step.owners:
            return step.owners[-1]
        for said in reversed(self._by_response.get(step.meaning, ())):
            if _is_telling(echo) or (before is not None and self._was_asked(said, before.meaning)):
                return said
        return None if before is None else self._by_prompt.get(before.digest.loose)

    def _was_asked(self, completion_id: str, meaning: bytes) -> bool:
        return [self._meaning_of(last) for last in self._tree[completion_id].new_messages[-1:]] == [meaning]

    def _cause(
        self, key: str, call: ModelCall, steps: Sequence[Step], origin: Completion
    ) -> tuple[DivergenceCause, int | None]:
        """The first change in a prompt counts, in this order: tools and other parts of the branch key, system text, the
        rest."""
        if origin.branch_key != key:
            return self._key_cause(call, origin), None
        sampled = (*self._tree.messages(origin), origin.response)
        theirs, ours = _systems(sampled), _systems(call.messages)
        for before, position in zip(theirs, ours, strict=False):
            if not self._is_echoed(sampled[before], call.messages[position], steps[position]):
                return "system_changed", position
        if len(theirs) != len(ours):
            return "system_changed", next(iter(ours[len(theirs) :]), None)
        cause: DivergenceCause = "truncated_turn" if origin.status == "aborted" else "history_edited"
        triples = enumerate(zip(sampled, call.messages, steps, strict=False))
        return cause, next((at for at, triple in triples if not self._is_echoed(*triple)), None)

    def _key_cause(self, call: ModelCall, origin: Completion) -> DivergenceCause:
        if self._tree.tools(origin) != call.tools:
            return "tools_changed"
        same_model = origin.metadata.get("requested_model", origin.model) == call.model
        return "template_changed" if same_model else "model_changed"

    def _is_echoed(self, message: Message, echo: Message, step: Step) -> bool:
        if message == echo:
            return True
        if message not in self._meanings:
            self._meanings[message] = self._meaning_of(message)
        return self._meanings[message] == step.meaning


def _systems(messages: Iterable[Message]) -> list[int]:
    """Returns the positions of system messages."""
    return [position for position, one in enumerate(messages) if one.role in ("system", "developer")]


def _is_telling(message: Message) -> bool:
    return any(isinstance(part, ToolCall) for part in message.parts) or len(said_by(message)) >= _TELLING_CHARS


def unknown(_message: Message) -> bytes | None:
    """Default: no digest is known."""
    return None


class Place(msgspec.Struct, frozen=True):
    """`messages[:num_shared]` are the parent's messages and its response; the rest is new."""

    branch_key: str
    parent_id: str | None
    num_shared: int
    new_messages: tuple[Message, ...]
    digest: HistoryDigest
    """Digest of the whole history."""
    lineage: Lineage = Lineage()
    """Lineage as far as the history shows it. The ledger adds siblings, retries and branches when the call is
    committed."""
    pinned: tuple[tuple[int, Message], ...] = ()
    """Position and first version of system messages that now differ in volatile text."""


def branch_key(call: ModelCall) -> str:
    """Returns the digest of everything before the messages: calls with different keys share no prefix."""
    thinking = () if call.thinking == ThinkingWish() else (call.thinking,)
    material = msgspec.json.encode((call.model, call.tools, call.template_kwargs, *thinking), order="deterministic")
    return hashlib.blake2b(material, digest_size=12).hexdigest()


def history_of_key(key: str) -> HistoryDigest:
    """Returns the digest of a history without messages. `key`: of its branch."""
    return HistoryDigest(key.encode(), b"")


class _Walk(NamedTuple):
    """One pass over a history, kept so that the next request of the conversation only needs a pass over its new
    part."""

    key: str
    messages: tuple[Message, ...]
    steps: tuple[Step, ...]


class PlaceIndex:
    """Finds parents among the fully answered completions of one session."""

    def __init__(self, tree: CompletionTree, volatile: VolatileText | None = None) -> None:
        """`tree`: must contain a completion before it is added here."""
        self._tree = tree
        self.volatile = VolatileText() if volatile is None else volatile
        # Not a bound method: a reference cycle would keep the session in memory.
        self._meaning = partial(meaning_of, self.volatile)
        self._lineage_index = LineageIndex(tree, self._meaning)
        self._ends: dict[str, HistoryDigest] = {}
        """completion id -> digest of its history and response"""
        self._by_end: dict[bytes, list[str]] = {}
        self._by_prompt: dict[bytes, list[str]] = {}
        """Completion ids by prompt, including aborted calls."""
        self._by_call_id: dict[str, str] = {}
        self._by_reply_id: dict[str, list[str]] = {}
        self._walks: list[_Walk] = []
        """The most recent ones, newest last."""

    async def place_in_turns(self, call: ModelCall, known: Digests) -> Place:
        """Like `place`, but gives other sessions their turn regularly while it digests a long history."""
        turn = Turn()
        key = branch_key(call)
        for end in range(_TURN_MESSAGES, len(call.messages), _TURN_MESSAGES):
            self._walk(key, call.messages[:end], known)
            await turn.give()
        await turn.give()
        place = self.place(call, known, key)
        await turn.give()
        return place

    def place(self, call: ModelCall, known: Digests = unknown, key: str | None = None) -> Place:
        """Returns the place of a call.

        known: digests of messages that were computed in advance with `meaning_of` and the same rules.
        key: the call's `branch_key`; None: computed here.
        """
        key = branch_key(call) if key is None else key
        steps = self._walk(key, call.messages, known).steps
        keyed: set[str] = set()
        parent_id, num_shared = None, 0
        for position, (message, step) in enumerate(zip(call.messages, steps, strict=True), start=1):
            if message.role == "assistant":
                keyed.update(step.owners)
                if (candidates := self._by_end.get(step.digest.strict)) is not None:
                    parent_id, num_shared = self._choose(candidates, message, keyed), position
        return Place(
            key,
            parent_id,
            num_shared,
            call.messages[num_shared:],
            steps[-1].digest if steps else history_of_key(key),
            self._lineage_index.lineage(key, call, steps, num_shared) or _of_parent(parent_id),
            self._pinned(parent_id, call.messages[:num_shared]),
        )

    def lineage(self, draft: Completion, history: HistoryDigest) -> Lineage:
        """Returns the lineage of a completion that is about to be committed."""
        same = self._by_prompt.get(history.strict) if history.loose else None
        if same is None:
            return draft.lineage
        answered = [earlier for earlier in same if self._tree[earlier].status == "complete"]
        if answered:
            return Lineage(relation="sibling", origin_id=answered[-1])
        return Lineage(relation="retry", origin_id=same[-1])

    def add(self, completion: Completion, history: HistoryDigest) -> None:
        """`history`: the digest of the call that it answers, from `place`."""
        completion_id = completion.completion_id
        self._by_prompt.setdefault(history.strict, []).append(completion_id)
        self._lineage_index.add_prompt(completion, history)
        if completion.status != "complete":
            return
        meaning = self._meaning(completion.response)
        self._ends[completion_id] = end = _rolled(history, completion.response, meaning)
        self._by_end.setdefault(end.strict, []).append(completion_id)
        self._lineage_index.add_response(completion, Step(meaning, end, ()))
        reply_id = completion.metadata.get("reply_id")
        if isinstance(reply_id, str):
            self._by_reply_id.setdefault(reply_id, []).append(completion_id)
        for part in completion.response.parts:
            if isinstance(part, ToolCall):
                self._by_call_id[part.call_id] = completion_id

    def restore(self, completion: Completion) -> None:
        """Add a completion read from the journal. Its parent must have been added before."""
        digest = history_of_key(completion.branch_key)
        if completion.messages_shared and completion.parent_id is not None:
            digest = self._ends[completion.parent_id]
        for message in completion.new_messages:
            digest = _rolled(digest, message, self._meaning(self._as_sampled(message, self._named_by(message))))
        self.add(completion, digest)

    # -- digesting a history -------------------------------------------------------------------------------------

    def _walk(self, key: str, messages: tuple[Message, ...], digests: Digests) -> _Walk:
        known = max(reversed(self._walks), key=lambda walk: _num_equal(walk.messages, messages), default=None)
        digest = history_of_key(key)
        num_known = 0
        steps: list[Step] = []
        if known is not None and known.key == key:
            num_known = _num_equal(known.messages, messages)
            steps = list(known.steps[:num_known])
            digest = steps[-1].digest if steps else digest
        for position in range(num_known, len(messages)):
            message = messages[position]
            if known is not None and position < len(known.messages) and known.messages[position] == message:
                # The same message after a different beginning: only the rolling digests are new.
                meaning, _, owners = known.steps[position]
            else:
                owners = self._named_by(message)
                sampled = self._as_sampled(message, owners)
                meaning = digests(sampled) or self._meaning(sampled)
            digest = _rolled(digest, message, meaning)
            steps.append(Step(meaning, digest, owners))
        walk = _Walk(key, messages, tuple(steps))
        if known is not None and known.key == key and num_known == len(known.messages):
            self._walks.remove(known)
        self._walks = [*self._walks, walk][-_MAX_WALKS:]
        return walk

    def _named_by(self, message: Message) -> tuple[str, ...]:
        """Returns the completions whose record keys `message` carries: in tool-call ids or signatures of thinking."""
        if message.role != "assistant":
            return ()
        named: list[str] = []
        for part in message.parts:
            if isinstance(part, ToolCall) and (owner := self._by_call_id.get(part.call_id)) is not None:
                named.append(owner)
            elif isinstance(part, Thinking) and part.signature:
                named += self._by_reply_id.get(signed_reply_id(part.signature), ())
        return tuple(dict.fromkeys(named))

    def _as_sampled(self, message: Message, named: tuple[str, ...]) -> Message:
        """Returns the response that `message` echoes, if its tool-call ids match and it lacks only text or arguments
        other than a JSON object: dialects and clients that cannot send those send `{}`."""
        if not named or _num_chars(message) > _MAX_ECHO_CHARS:
            return message
        owners = {self._by_call_id.get(part.call_id) for part in message.parts if isinstance(part, ToolCall)}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            return message
        sampled = self._tree[owner].response
        says_same = said_by(message) in ("", said_by(sampled))
        return sampled if says_same and is_echo(calls_of(message), calls_of(sampled)) else message

    # -- the parent ----------------------------------------------------------------------------------------------

    def _choose(self, candidates: Sequence[str], echo: Message, keyed: set[str]) -> str:
        """Choose among histories with the same meaning: by record key, else an exact echo, else the latest."""
        if len(candidates) == 1:
            return candidates[0]
        ranks = [
            (
                candidate in keyed or self._nearest_keyed(candidate) in keyed,
                self._tree[candidate].response == echo,
                number,
            )
            for number, candidate in enumerate(candidates)
        ]
        return candidates[max(ranks)[2]]

    def _nearest_keyed(self, completion_id: str) -> str | None:
        """Returns the completion itself or its nearest ancestor whose response has record keys."""
        at: str | None = completion_id
        while at is not None:
            completion = self._tree[at]
            if any(isinstance(part, ToolCall) for part in completion.response.parts):
                return at
            at = completion.parent_id
        return None

    def _pinned(self, parent_id: str | None, shared: Sequence[Message]) -> tuple[tuple[int, Message], ...]:
        systems = [(place, now) for place, now in enumerate(shared) if now.role in ("system", "developer")]
        if parent_id is None or not systems:
            return ()
        recorded = self._tree.messages(self._tree[parent_id])
        return tuple((place, recorded[place]) for place, now in systems if recorded[place] != now)


def _of_parent(parent_id: str | None) -> Lineage:
    return Lineage() if parent_id is None else Lineage(relation="continuation", origin_id=parent_id)


def _num_chars(message: Message) -> int:
    """Returns the number of characters of its text and its calls' arguments."""
    texts = (
        part.text if isinstance(part, Text) else part.arguments
        for part in message.parts
        if isinstance(part, Text | ToolCall)
    )
    return sum(map(len, texts))


def meaning_of(volatile: VolatileText, message: Message) -> bytes:
    """Returns the digest of the message alone."""
    # SHA-256: processors have instructions for it, so a long prompt takes a fifth of BLAKE2's time.
    return hashlib.sha256(normal_form(message, volatile)).digest()


def _rolled(digest: HistoryDigest, message: Message, meaning: bytes) -> HistoryDigest:
    strict = hashlib.sha256(digest.strict + meaning).digest()
    if message.role in ("system", "developer"):
        return HistoryDigest(strict, digest.loose)
    return HistoryDigest(strict, hashlib.sha256(digest.loose + meaning).digest())


def _num_equal(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    """Returns the length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


def signed_reply_id(signature: str) -> str:
    """Returns the reply id in one of our signatures; empty for others."""
    try:
        text = base64.b64decode(signature, validate=True).decode()
    except ValueError:
        text = signature
    owner, _, reply_id = text.partition(":")
    return reply_id if owner == "gangline" else ""
