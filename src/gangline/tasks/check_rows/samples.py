"""A sample: token ids with their mask, converted from any system's record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gangline.tasks.check_rows.kinds import KINDS, Finding

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_IMAGE_PARTS = {"image", "image_url", "input_image", "video", "video_url", "input_video"}


@dataclass(slots=True, kw_only=True)
class Sample:
    """One training sample, or one call. All arrays are [T], over prompt and response."""

    row: int
    number: int = 1
    """Number of the sample in the record, from 1."""
    ids: Ints
    mask: NDArray[np.bool_]
    """True where trained."""
    logprobs: Floats | None
    """0.0 where masked. None: missing from the record, or of the wrong length."""
    num_prompt: int
    session: str | None = None
    """Session, rollout or trace; None if the form does not contain it."""
    versions: Ints | None = None
    padding: NDArray[np.bool_] | None = None
    """True where the record itself marks padding."""
    among_kept: NDArray[np.bool_] | None = None
    """True where the log-prob is relative to the ids kept by top-k and top-p; None: nowhere."""
    is_call: bool = False
    """Whether it is one call with its whole prompt, so that the samples of a session can be compared."""
    must_continue: bool = False
    """Whether the form's trainer joins the calls of a session into one row."""
    is_rounded: bool = False
    """Whether log-probs are written with few decimals, so that many are 0.0."""
    findings: list[Finding] = field(default_factory=list[Finding])
    """Findings from parsing the record come first."""

    def add(self, kind: str, position: int | None, detail: str) -> None:
        self.findings.append(
            Finding(
                kind=kind,
                severity=KINDS[kind].severity,
                row=self.row,
                sample=self.number,
                position=position,
                detail=detail,
            )
        )


def streamed(
    *,
    row: int,
    number: int = 1,
    prompt: Any,
    response: Any,
    mask: Any = None,
    logprobs: Any = None,
    session: Any = None,
) -> Sample:
    """A sample from arrays over its response, as most forms write them. `mask` None: all of it is trained.

    Arrays whose length differs from the response's are reported and ignored.
    """
    prompt_ids, response_ids = as_ids(prompt), as_ids(response)
    num_prompt, num = len(prompt_ids), len(response_ids)
    marks = np.ones(num, np.int64) if mask is None else as_ids(mask)
    sample = Sample(
        row=row,
        number=number,
        ids=np.concatenate((prompt_ids, response_ids)),
        mask=np.zeros(num_prompt + num, np.bool_),
        logprobs=None,
        num_prompt=num_prompt,
        session=None if session is None else str(session),
    )
    if len(marks) == num:
        sample.mask[num_prompt:] = marks == 1
        odd = (marks != 0) & (marks != 1)
        if odd.any():
            at = int(np.argmax(odd))
            sample.add("mask_values", num_prompt + at, f"value {int(marks[at])}")
    else:
        sample.mask[num_prompt:] = True
        sample.add("lengths", None, f"{len(marks)} mask values for {num} tokens")
    if logprobs is not None:
        values = as_floats(logprobs)
        if len(values) == num:
            sample.logprobs = np.concatenate((np.zeros(num_prompt), values))
        else:
            sample.add("lengths", None, f"{len(values)} log-probs for {num} tokens")
    return sample


def as_ids(values: Any) -> Ints:
    return np.zeros(0, np.int64) if values is None else np.asarray(values, dtype=np.int64).reshape(-1)


def as_floats(values: Any) -> Floats:
    """Null becomes NaN."""
    return np.asarray(values, dtype=np.float64).reshape(-1)


def spans_of(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Runs of True, as [start, end)."""
    edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def image_urls(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Addresses of images in messages of Gangline's rows, in prompt order: a message's tool results come first."""
    for message in messages:
        parts: list[dict[str, Any]] = message.get("parts") or []
        results = [piece for part in parts if part.get("type") == "tool_result" for piece in part.get("content") or ()]
        yield from (str(part.get("url")) for part in (*results, *parts) if part.get("type") == "image")


def has_images(messages: Any) -> bool:
    """Whether a conversation, in any provider's form, contains an image or a video."""
    if not isinstance(messages, list | tuple):
        return False
    maps = (cast("dict[str, Any]", one) for one in cast("list[Any]", messages) if isinstance(one, dict))
    contents = (message.get("content") or message.get("parts") for message in maps)
    parts = (part for content in contents if isinstance(content, list) for part in cast("list[Any]", content))
    return any(cast("dict[str, Any]", part).get("type") in _IMAGE_PARTS for part in parts if isinstance(part, dict))
