"""The tokens of a session's calls as columns: ids, log-probs, mask, versions, and the bytes of each id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gangline.domain.completion import Completion
from gangline.domain.tokens import TokenIds, token_ids
from gangline.server.web.outline import OpenedSession

TokenBytes = Mapping[int, bytes]
"""Bytes of known token ids."""


def token_columns(session: OpenedSession, first: int, limit: int, known: TokenBytes) -> dict[str, NDArray[Any]]:
    """Tokens of the calls `first` to `first + limit`, call by call: new context, then the sampled ids.

    starts: [calls + 1] int32, where each call's tokens begin, and the end of the last. sampled: [calls] int32, where
    each call's sampled ids begin. ids: [T] int32. logprobs: [T] float32, 0.0 for context. mask: [T] int8, 1 for trained
    tokens. versions: [T] int32, -1 for context and if unknown. text_ids: [U] int32, the ids with known bytes.
    text_starts: [U + 1] int32 into `text`. text: uint8, UTF-8 unless a token ends inside a character.

    known: of the tokenizer of the first of these calls. Calls with another one have no texts.
    """
    calls = session.calls[first : first + limit]
    lines = session.outline.calls[first : first + limit]
    ids = _ids(calls)
    logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
    mask = np.zeros(len(ids), np.int8)
    starts, sampled = np.zeros(len(calls) + 1, np.int32), np.zeros(len(calls), np.int32)
    at = 0
    for index, (call, line) in enumerate(zip(calls, lines, strict=True)):
        begin = at + len(call.prompt_suffix_ids)
        at = begin + len(call.sampled_ids)
        sampled[index], starts[index + 1] = begin, at
        if len(call.logprobs) == len(call.sampled_ids):
            logprobs[begin:at] = call.logprobs
        for span in call.certificate.version_spans:
            versions[begin + span.start : min(begin + span.end, at)] = span.version
        mask[begin:at] = line.masked is None
    return {
        "starts": starts,
        "sampled": sampled,
        "ids": ids,
        "logprobs": logprobs,
        "mask": mask,
        "versions": versions,
        **_text_columns(_ids(of_one_tokenizer(calls)), known),
    }


def texts_in(columns: Mapping[str, NDArray[Any]]) -> dict[int, bytes]:
    """Token id -> bytes, from `token_columns`."""
    text, starts = columns["text"].tobytes(), columns["text_starts"].tolist()
    return {one: text[starts[at] : starts[at + 1]] for at, one in enumerate(columns["text_ids"].tolist())}


def tokenizer_of(call: Completion) -> str:
    """Digest of the call's tokenizer; the model's name if there is none."""
    return call.certificate.tokenizer_digest or call.model


def of_one_tokenizer(calls: Sequence[Completion]) -> list[Completion]:
    """The calls with the tokenizer of the first. An id has another text in the calls of another model."""
    return [call for call in calls if tokenizer_of(call) == tokenizer_of(calls[0])]


def arrays_of(calls: Iterable[Completion]) -> list[TokenIds]:
    """New context and sampled ids of each call."""
    return [ids for call in calls for ids in (call.prompt_suffix_ids, call.sampled_ids)]


def _ids(calls: Sequence[Completion]) -> TokenIds:
    return np.concatenate([token_ids(), *arrays_of(calls)])


def recorded_texts(calls: Sequence[Completion]) -> dict[int, bytes]:
    """Bytes of the ids whose text the engine reported (`capture.token_texts`)."""
    return {
        token_id: text.encode(errors="replace")
        for call in calls
        if len(call.sampled_texts) == len(call.sampled_ids)
        for token_id, text in zip(call.sampled_ids.tolist(), call.sampled_texts, strict=True)
    }


def _text_columns(ids: NDArray[np.int32], known: TokenBytes) -> dict[str, NDArray[Any]]:
    found = [(token_id, known[token_id]) for token_id in np.unique(ids).tolist() if token_id in known]
    starts = np.zeros(len(found) + 1, np.int32)
    np.cumsum([len(content) for _, content in found], out=starts[1:])
    text = b"".join(content for _, content in found)
    return {
        "text_ids": np.array([token_id for token_id, _ in found], np.int32),
        "text_starts": starts,
        "text": np.frombuffer(text, np.uint8),
    }
