"""Records that contain whole rows: ours, TRL's, slime's and verl's."""

# Records can have any structure.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from gangline.tasks.check_rows.evidence import gangline_evidence, slime_experts, slime_mask
from gangline.tasks.check_rows.samples import Sample, as_floats, as_ids, has_images, image_urls, streamed

Record = Mapping[str, Any]

COLUMNS = ("ids", "prompt", "response", "mask", "logprobs", "versions", "session", "reward")
"""Names that columns of an unknown form can be mapped to."""
_DATASET = {"ids": "input_ids", "mask": "assistant_masks", "session": "session_id", "reward": "trace_reward"}


def named_rows(names: Mapping[str, str], record: Record, row: int) -> Iterator[Sample]:
    """Rows of any form. names: one of COLUMNS -> its column. `ids` contains all tokens."""
    values = {name: record[column] for name, column in names.items()}
    prompt, response = ((), values["ids"]) if "ids" in values else (values.get("prompt"), values["response"])
    prompt, response = as_ids(prompt), as_ids(response)
    short = {name: values.get(name) for name in ("mask", "logprobs", "versions")}
    num = len(prompt) + len(response)
    for name, given in short.items():  # over the whole stream, or over the response
        if given is not None and len(given) == num:
            short[name] = given[len(prompt) :]
    sample = streamed(
        row=row,
        prompt=prompt,
        response=response,
        mask=short["mask"],
        logprobs=short["logprobs"],
        session=values.get("session"),
    )
    if "ids" in values:
        sample.num_prompt = int(np.argmax(sample.mask)) if sample.mask.any() else num
    if (versions := short["versions"]) is not None and len(versions) == len(response):
        sample.versions = np.concatenate((np.full(len(prompt), -1), as_ids(versions)))
    elif versions is not None:
        sample.add("lengths", None, f"{len(versions)} versions for {len(response)} tokens")
    _nothing_trained(sample)
    _reward(sample, values.get("reward"), is_fault=False)
    yield sample


def conversations(record: Record, row: int) -> Iterator[Sample]:
    """Messages without tokens, as written by `gangline data` and `gangline export --format messages`."""
    sample = streamed(row=row, prompt=(), response=())
    sample.add("no_tokens", None, "messages without token ids")
    yield sample


def gangline_rows(record: Record, row: int) -> Iterator[Sample]:
    """Rows of `gangline export`, and of `gangline data --kind tokens`."""
    if "input_ids" in record:
        same = {name: name for name in ("logprobs", "versions")}
        yield from named_rows(_DATASET | same, record, row)
        return
    sample = streamed(
        row=row,
        prompt=record["prompt_ids"],
        response=record["response_ids"],
        mask=record["loss_mask"],
        logprobs=record["response_logprobs"],
        session=record.get("session_id"),
    )
    versions = as_ids(record.get("response_versions"))
    if len(versions) == len(sample.ids) - sample.num_prompt:
        sample.versions = np.concatenate((np.full(sample.num_prompt, -1), versions))
    else:
        sample.add("lengths", None, f"{len(versions)} versions for {len(sample.ids) - sample.num_prompt} tokens")
    for splice in record.get("splices") or ():
        at = sample.num_prompt + int(splice["at"])
        sample.add("splice", at, f"declared by the builder: {splice['cause']}")
    if record.get("untrainable") is None:
        _nothing_trained(sample)
    _reward(sample, record.get("reward"), is_fault=record.get("outcome") == "infra_error")
    _certified_pixels(sample, record)
    gangline_evidence(sample, record)
    yield sample


def trl_rows(record: Record, row: int) -> Iterator[Sample]:
    """`RolloutSample` of the asynchronous trainer, or the return value of a `rollout_func`.

    Source: trl 1.16.0, `experimental/async_grpo/async_rollout_worker.py`, `trainer/grpo_trainer.py`.
    """
    if "input_ids" in record:
        sample = streamed(
            row=row,
            prompt=(),
            response=record["input_ids"],
            mask=record["completion_mask"],
            logprobs=record.get("old_log_probs"),
        )
        sample.num_prompt = int(np.argmax(sample.mask)) if sample.mask.any() else len(sample.ids)
        version = record.get("model_version")
        if version is not None and int(version) < 0:
            sample.add("version_invalid", None, f"version {version}")
        _reward(sample, record.get("advantage"), is_fault=False)
        _pixels(sample, record.get("prompt"), has_pixels=False)
        _nothing_trained(sample)
        yield sample
        return
    for number, values in enumerate(
        _unbatched(record, ("prompt_ids", "completion_ids", "logprobs", "env_mask")), start=1
    ):
        sample = streamed(
            row=row,
            number=number,
            prompt=values["prompt_ids"],
            response=values["completion_ids"],
            mask=values.get("env_mask"),
            logprobs=_chosen(values.get("logprobs")),
        )
        _nothing_trained(sample)
        yield sample


def slime_samples(record: Record, row: int) -> Iterator[Sample]:
    """`Sample.to_dict()`, or a document of `--save-debug-rollout-data` that contains many.

    Source: slime 624b824 (2026-08-21), `slime/utils/types.py`.
    """
    samples = record.get("samples")
    for number, one in enumerate([record] if samples is None else samples, start=1):
        yield _slime_sample(one, row, number)


def _slime_sample(record: Record, row: int, number: int) -> Sample:
    ids, num = as_ids(record["tokens"]), int(record["response_length"])
    if not 0 <= num <= len(ids):
        sample = streamed(row=row, number=number, prompt=(), response=ids)
        sample.add("lengths", None, f"response_length {num}, but {len(ids)} tokens")
        return sample
    cut = len(ids) - num
    sample = streamed(
        row=row,
        number=number,
        prompt=ids[:cut],
        response=ids[cut:],
        mask=record.get("loss_mask"),
        logprobs=record.get("rollout_log_probs"),
        session=record.get("session_id"),
    )
    counted = (record.get("spec_info") or {}).get("completion_token_num") or 0
    if counted > num:
        sample.add("tokens_dropped", None, f"the engine sampled {counted} tokens, the response has {num}")
    versions = [int(one) for one in record.get("weight_versions") or () if str(one).lstrip("-").isdigit()]
    falls = [one for one in pairwise(versions) if one[1] < one[0]]
    if falls:
        sample.add("versions_backwards", None, f"weight version {falls[0][1]} after {falls[0][0]}")
    if any(version < 0 for version in versions):
        sample.add("version_invalid", None, f"weight version {min(versions)}")
    if record.get("remove_sample"):
        sample.mask[:] = False  # the trainer does so
    else:
        _nothing_trained(sample)
        reward = record.get("reward")
        is_fault = record.get("status") in ("failed", "aborted")
        _reward(sample, None if isinstance(reward, Mapping) else reward, is_fault=is_fault)
    if record.get("multimodal_inputs") and not record.get("multimodal_train_inputs"):
        sample.add("pixels_missing", None, "multimodal_inputs without multimodal_train_inputs")
    slime_mask(sample, record.get("rollout_top_p_token_ids"), record.get("rollout_top_p_token_offsets"))
    slime_experts(sample, record.get("rollout_routed_experts"))
    return sample


def verl_rows(record: Record, row: int) -> Iterator[Sample]:
    """`AgentLoopOutput`, its dictionary of tensors, or a padded batch of them.

    Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py`.
    """
    names = ("prompts", "responses", "response_mask", "rollout_log_probs", "attention_mask", "multi_modal_inputs")
    batch = record.get("batch", record)
    if "responses" not in batch:
        yield _verl_row({**record, "prompts": record["prompt_ids"], "responses": record["response_ids"]}, row, 1)
        return
    for number, values in enumerate(_unbatched(batch, names), start=1):
        yield _verl_row({**record, **values}, row, number)


def _verl_row(record: Record, row: int, number: int) -> Sample:
    prompt, response = as_ids(record["prompts"]), as_ids(record["responses"])
    logprobs = record.get("rollout_log_probs")
    sample = streamed(
        row=row,
        number=number,
        prompt=prompt,
        response=response,
        mask=record["response_mask"],
        logprobs=record.get("response_logprobs") if logprobs is None else logprobs,
    )
    attention = record.get("attention_mask")
    if attention is not None:
        attended = as_ids(attention)
        if len(attended) == len(sample.ids):
            sample.padding = attended == 0
        else:
            sample.add("lengths", None, f"attention mask of {len(attended)} for {len(sample.ids)} tokens")
    extra = record.get("extra_fields") or {}
    low, high = (extra.get(name, record.get(name)) for name in ("min_global_steps", "max_global_steps"))
    if isinstance(low, int) and isinstance(high, int) and low > high:
        sample.add("versions_backwards", None, f"sampled from step {low} to step {high}")
    if any(isinstance(one, int) and one < 0 for one in (low, high)):
        sample.add("version_invalid", None, f"sampled from step {low} to step {high}")
    _nothing_trained(sample)
    _reward(sample, record.get("reward_score"), is_fault=False)
    if record.get("multi_modal_data") and not (
        record.get("multi_modal_inputs") or record.get("multi_modal_data", {}).get("images")
    ):
        sample.add("pixels_missing", None, "multi_modal_data without images")
    _pixels(sample, record.get("raw_prompt"), has_pixels=bool(record.get("multi_modal_inputs")))
    return sample


def _unbatched(record: Record, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rows of a batch whose columns are lists of lists; a single row if they are lists of numbers."""
    present = {name: record[name] for name in names if record.get(name) is not None}
    first = next(iter(present.values()))
    if len(first) and not np.isscalar(first[0]) and np.ndim(first[0]) > 0:
        for index in range(len(first)):
            yield {name: column[index] for name, column in present.items()}
    else:
        yield present


def _chosen(logprobs: Any) -> Any:
    """TRL's engines report the sampled token's log-prob first, followed by the top-k."""
    if logprobs is None or np.ndim(logprobs[0] if len(logprobs) else 0.0) == 0:
        return logprobs
    return as_floats([logprob[0] for logprob in logprobs])


def _nothing_trained(sample: Sample) -> None:
    if not sample.mask.any():
        sample.add("nothing_trained", None, f"{len(sample.ids)} tokens, none trained")


def _reward(sample: Sample, reward: Any, *, is_fault: bool) -> None:
    if reward is None or not sample.mask.any():
        return
    if not np.isfinite(float(reward)):
        sample.add("reward_invalid", None, f"reward {reward}")
    elif is_fault and float(reward) == 0.0:
        sample.add("fault_scored", None, "it ended by a fault, its reward is 0, and it is trained")


def _certified_pixels(sample: Sample, record: Record) -> None:
    """The images are in the messages. Those named by the last certificate must be present, each in its place."""
    evidence = [one["images"] for one in record.get("certificates") or () if one.get("images")]
    placed = evidence[-1]["placed"] if evidence else []
    messages = [*(record.get("prompt_messages") or ()), *(record.get("response_messages") or ())]
    urls = list(image_urls(messages))
    if not sample.mask.any():
        return
    if not placed and (urls or has_images(messages)):
        sample.add("pixels_missing", None, "images in its messages, and no certificate of them")
    elif [_digest(url) for url in urls] != [image["digest"] for image in placed]:
        sample.add("pixels_missing", None, f"{len(placed)} images are certified, and its messages hold other files")


def _digest(url: str) -> str:
    try:
        return hashlib.sha256(base64.b64decode(url.partition(",")[2], validate=True)).hexdigest()
    except (binascii.Error, ValueError):
        return ""


def _pixels(sample: Sample, messages: Any, *, has_pixels: bool) -> None:
    if not has_pixels and sample.mask.any() and has_images(messages):
        sample.add("pixels_missing", None, "images in its messages, none in the row")
