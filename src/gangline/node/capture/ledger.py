"""The records of one session attempt, in the same order everywhere: ids, journal, tree, index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from gangline.domain.completion import Completion, CompletionTree, Lineage
from gangline.node.capture.capture import ENGINE_CALL_IDS
from gangline.node.capture.meaning import VolatileText
from gangline.node.capture.placing import HistoryDigest, PlaceIndex
from gangline.rows.forks.calls import REPLAYED

_log = logging.getLogger("gangline.calls")


class CompletionJournal(Protocol):
    async def append_all(self, completions: Sequence[Completion]) -> None:
        """Durable on return; after a crash or an error, all or none are stored. Raises: StoreError, DiskFull."""
        ...


class Ledger:
    """A completion is in the tree, and so visible, only once it is in the journal."""

    def __init__(
        self,
        session_id: str,
        attempt: int,
        journal: CompletionJournal,
        completions: Iterable[Completion] = (),
        volatile: VolatileText | None = None,
        role_after_fork: str | None = None,
    ) -> None:
        """completions: the journal's records of this attempt, in commit order.
        volatile: the rules for placing calls; None: the default ones.
        role_after_fork: the role whose engines continue after a fork's repeated records; None: the policy's do.
        """
        self.session_id = session_id
        self.attempt = attempt
        self.tree = CompletionTree()
        self.volatile = VolatileText() if volatile is None else volatile
        self._role_after_fork = role_after_fork
        self._indexes: dict[str | None, PlaceIndex] = {}
        """By the role whose engines answer. Ids of one model never continue another's, except after a fork's repeated
        records: the engines behind the fork share their tokenizer and template."""
        self._journal = journal
        self._num_committed = 0
        self.num_sampled_tokens = 0
        """Sampled tokens of the agent's completions, including aborted ones."""
        self.engine_call_ids: dict[str, str] = {}
        """Call id as its client knows it -> id from the engine or the model, where prompts show ids."""
        self._replies: dict[str, list[str]] = {}
        """reply id -> its completions, one per choice"""
        self._continued: set[str] = set()
        """Completions that another completion continues."""
        self._order = asyncio.Lock()
        self._grown = asyncio.Event()
        """Set by the next commit, which also replaces it."""
        # The journal has the bytes; an open session never needs them.
        for completion in map(Completion.without_evidence_bytes, completions):
            self.tree.add(completion)
            self._num_committed += 1
            self._note(completion)
            self._index_for(completion).restore(completion)

    async def commit(self, drafts: Sequence[Completion], history: HistoryDigest) -> list[Completion]:
        """Add drafts to journal, tree and index, in that order. Returns them with their ids.

        `history`: the digest of the call they answer.

        Raises: StoreError; then no draft is in the journal or the tree.
        """
        async with self._order:
            first, lineage = self._num_committed + 1, self._lineage(drafts[0], history)
            committed = [
                msgspec.structs.replace(draft, completion_id=f"c{self.attempt}-{number:06d}", lineage=lineage)
                for number, draft in enumerate(drafts, start=first)
            ]
            await self._journal.append_all(committed)
            for completion in map(Completion.without_evidence_bytes, committed):
                self._num_committed += 1
                self.tree.add(completion)
                self._note(completion)
                self._index_for(completion).add(completion, history)
                self._report(completion)
            grown, self._grown = self._grown, asyncio.Event()
            grown.set()
        return committed

    def index_of(self, engine_role: str | None) -> PlaceIndex:
        """Returns the places among the calls that a role's own engines answered; None: the policy's."""
        if engine_role not in self._indexes:
            self._indexes[engine_role] = PlaceIndex(self.tree, self.volatile)
        return self._indexes[engine_role]

    def _index_for(self, completion: Completion) -> PlaceIndex:
        role = self._role_after_fork if REPLAYED in completion.metadata else completion.certificate.engine_role
        return self.index_of(role)

    async def beyond(self, num_completions: int) -> None:
        """Wait until more completions than this are committed."""
        while self._num_committed <= num_completions:
            await self._grown.wait()

    def _lineage(self, draft: Completion, history: HistoryDigest) -> Lineage:
        """Determined at commit: of concurrent calls, the first to be answered is the continuation."""
        lineage = self._index_for(draft).lineage(draft, history)
        if lineage.relation == "continuation" and lineage.origin_id in self._continued:
            return msgspec.structs.replace(lineage, relation="branch")
        return lineage

    def reply(self, reply_id: str) -> Completion | None:
        """Returns the first choice of a complete reply, by its id with or without the dialect's prefix."""
        for known in (reply_id, reply_id.rpartition("_")[2], reply_id.rpartition("-")[2]):
            if known in self._replies:
                return self.tree[self._replies[known][0]]
        return None

    def names_reply(self, reply_ids: Iterable[str]) -> bool:
        """Whether any of the ids, without a dialect's prefix, belongs to a complete reply."""
        return not self._replies.keys().isdisjoint(reply_ids)

    def is_continued(self, reply_id: str) -> bool:
        """Whether a later call continues any choice of this reply."""
        return any(completion_id in self._continued for completion_id in self._replies.get(reply_id, ()))

    def _note(self, completion: Completion) -> None:
        if not completion.of_environment:
            self.num_sampled_tokens += len(completion.sampled_ids)
        self.engine_call_ids |= completion.metadata.get(ENGINE_CALL_IDS, {})
        reply_id = completion.metadata.get("reply_id")
        if isinstance(reply_id, str) and completion.status == "complete":
            self._replies.setdefault(reply_id, []).append(completion.completion_id)
        if completion.parent_id is not None:
            self._continued.add(completion.parent_id)

    def _report(self, completion: Completion) -> None:
        certificate, lineage = completion.certificate, completion.lineage
        is_replayed = REPLAYED in completion.metadata  # expected: its tokens belong to the parent
        if completion.status == "complete" and certificate.untrainable is not None and not is_replayed:
            _log.error(
                "call.untrainable session=%s completion=%s reason=%s",
                *(self.session_id, completion.completion_id, certificate.untrainable),
            )
        _log.info(
            "call.%s session=%s completion=%s relation=%s origin=%s prompt=%s context=%s cause=%s sampled=%d finish=%s",
            *(completion.status, self.session_id, completion.completion_id, lineage.relation, lineage.origin_id),
            *(
                certificate.prompt_source,
                certificate.context,
                certificate.cause or lineage.cause,
                len(completion.sampled_ids),
                certificate.finish_reason,
            ),
        )
