"""Kinds of findings: their severity, meaning and remedy."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["error", "warning"]
"""error: wrong for every trainer. warning: wrong unless intended."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault in rows."""

    severity: Severity
    meaning: str
    advice: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault at one place."""

    kind: str
    severity: Severity
    row: int
    """Number of the record in the file, from 1."""
    position: int | None
    """Index into the sample's tokens, including the prompt; None for the whole row."""
    detail: str
    sample: int = 1
    """Number of the sample in the record, from 1: a record may contain many calls."""


KINDS: dict[str, Kind] = {
    "lengths": Kind("error", "arrays of one row disagree in length", "find the code that pads or cuts one of them"),
    "mask_values": Kind("error", "the loss mask holds other values than 0 and 1", "write 1 for trained tokens, else 0"),
    "ids_invalid": Kind(
        "error", "token ids are negative or beyond the vocabulary", "check tokenizer and padding value"
    ),
    "nothing_trained": Kind("warning", "no token of the row is trained", "leave such rows out of the batch"),
    "logprobs_missing": Kind("error", "this row has no log-probs, other rows have", "drop the row, or ask the engine"),
    "logprob_nan": Kind("error", "a log-prob is NaN, infinite or null", "drop the row; look for a fault of the engine"),
    "logprob_positive": Kind("error", "a log-prob is above 0", "check that these are log-probs, not losses or ranks"),
    "logprob_sentinel": Kind("error", "a log-prob is a placeholder such as -9999", "drop the row"),
    "logprobs_zero": Kind(
        "error", "all log-probs of a trained span are 0.0", "the engine reported none: mask the span"
    ),
    "logprobs_padded": Kind("warning", "log-probs of a trained span end in a run of 0.0", "align them with the ids"),
    "header_trained": Kind(
        "warning",
        "a trained turn begins with log-probs of 0.0, which are rare elsewhere in the file",
        "does the mask begin with the template's header? else the model is sure of how it begins",
    ),
    "logprobs_copied": Kind("error", "other tokens have the same log-probs to the last bit", "were they copied?"),
    "logprobs_constant": Kind(
        "error", "all log-probs of the row are one number", "the engine reported none: do not train the row"
    ),
    "past_stop": Kind(
        "warning", "a trained turn continues after a stop token", "is the context between two turns trained?"
    ),
    "logprobs_shifted": Kind("error", "log-probs stand alongside their tokens", "move them by one position"),
    "padding_trained": Kind("error", "padding is trained", "set the loss mask to 0 there"),
    "special_trained": Kind("warning", "a special token that ends no turn is trained", "was it sampled? else mask it"),
    "context_trained": Kind("error", "tokens that no call sampled are trained", "set the loss mask to 0 there"),
    "sampled_as_context": Kind(
        "warning", "tokens that carry a log-prob are masked: sampled, but context", "is the mask shifted, or meant so?"
    ),
    "cut_turn": Kind(
        "warning",
        "a trained turn ends without a stop token although the row continues: its end became context",
        "TRL: fork_threshold_tokens=0, so that a changed turn begins a new row",
    ),
    "tokens_dropped": Kind("error", "the engine sampled more tokens than the row holds", "keep ids as sampled"),
    "tokens_doubled": Kind("error", "sampled tokens stand in the row more than once", "keep each call once"),
    "splice": Kind(
        "error",
        "the context before a call is not the one that the engine saw",
        "begin a new row where a prompt does not continue the last prompt and its sampled tokens",
    ),
    "context_length": Kind(
        "error", "the engine read a prompt of another length than the row's context", "take prompt ids from the engine"
    ),
    "trained_twice": Kind("error", "the same sampled tokens are trained in two rows", "keep one of them"),
    "retry_trained": Kind(
        "warning", "two calls of one session have the same prompt, and both are trained", "keep the one that was used"
    ),
    "pixels_missing": Kind("error", "the conversation has images, the row has no pixels", "carry the processed pixels"),
    "masks_wrong": Kind(
        "error", "kept ids are not those of the trained tokens", "carry one set for each token, in the same order"
    ),
    "experts_wrong": Kind(
        "error",
        "routed experts are not those of all tokens but the last, or change in number",
        "carry the engine's array as it is, prompt included",
    ),
    "evidence_missing": Kind(
        "warning", "the row says that its masks or experts are not known", "do not train it where they are replayed"
    ),
    "version_invalid": Kind("error", "policy versions of trained tokens are missing or impossible", "stamp each call"),
    "versions_backwards": Kind("error", "the policy version falls within a row", "was a row joined in a wrong order?"),
    "reward_invalid": Kind("error", "the reward is NaN or infinite", "drop the row, and look at the reward function"),
    "fault_scored": Kind(
        "error", "a fault of the infrastructure is scored with zero and trained", "drop such rows from their group"
    ),
    "no_tokens": Kind(
        "warning",
        "the record has no token ids: there is nothing to check",
        "check rows: gangline export, --kind tokens",
    ),
    "unreadable": Kind(
        "error",
        "the record is of no known form, or lacks fields of its form",
        "name it with --form, or its columns with --map",
    ),
    "model_disagrees": Kind(
        "error", "recomputed log-probs differ from the recorded ones", "is it the same model, temperature and context?"
    ),
}
