"""Records that contain calls: OpenEnv's training traces, NeMo Gym's token entries, verifiers' traces, and ATIF."""

# Records can have any structure.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gangline.tasks.check_rows.samples import Sample, as_floats, as_ids, has_images, streamed

Record = Mapping[str, Any]


def openenv_trace(record: Record, row: int) -> Iterator[Sample]:
    """`TrainingTrace`, or one of its turns.

    Source: openenv 0.10.0, `core/harness/training.py`.
    """
    turns = record.get("turns")
    seen: set[str] = set()
    for number, turn in enumerate([record] if turns is None else turns, start=1):
        prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
        marks = as_ids(turn["loss_mask"])
        sample = streamed(
            row=row,
            number=number,
            prompt=prompt,
            response=sampled,
            mask=marks[len(prompt) :],
            logprobs=turn["per_token_logps"],
            session=f"row {row}",
        )
        sample.is_call = True
        if marks[: len(prompt)].any():
            sample.add("context_trained", int(np.argmax(marks[: len(prompt)] != 0)), "the mask trains the prompt")
        node = str(turn.get("node_id", number))
        if node in seen:
            sample.add("trained_twice", None, f"node {node} is there twice")
        seen.add(node)
        if sample.mask.any() and has_images((turn.get("request") or {}).get("messages")):
            sample.add("pixels_missing", None, "images in the request, none in the turn")
        yield sample


def nemo_gym_entries(record: Record, row: int) -> Iterator[Sample]:
    """A `TokenEntry` of the token capture, or a rollout whose response items carry token ids.

    A rollout's items must continue each other, because NeMo RL joins them into one row. Entries need not.
    Source: NeMo Gym 07d6b0d (2026-08-22), `nemo_gym/token_id_capture/records.py`, `nemo_gym/openai_utils.py`.
    """
    response = record.get("response") or record
    is_entry = "generation_token_ids" in record
    items = [record] if is_entry else [one for one in response["output"] if one.get("generation_token_ids") is not None]
    asked = (record.get("responses_create_params") or {}).get("input")
    for number, item in enumerate(items, start=1):
        sample = streamed(
            row=row,
            number=number,
            prompt=item["prompt_token_ids"],
            response=item["generation_token_ids"],
            logprobs=item.get("generation_log_probs"),
            session=record["rollout_id"] if is_entry else f"row {row}",
        )
        sample.is_call, sample.must_continue = True, not is_entry
        if number == 1 and has_images(asked):
            sample.add("pixels_missing", None, "images in the request, none in the rollout")
        if number == len(items) and not is_entry:
            _rollout_usage(sample, response.get("usage"), sum(len(one["generation_token_ids"]) for one in items))
        yield sample


def _rollout_usage(sample: Sample, usage: Any, num: int) -> None:
    """A rollout's usage is summed over its calls by some agents, and is the last call's in others."""
    counted = (usage or {}).get("output_tokens") or 0
    if counted > num:
        sample.add("tokens_dropped", None, f"{counted} tokens by the engine's count, {num} in the rollout")


def verifiers_trace(record: Record, row: int) -> Iterator[Sample]:
    """A `Trace`, or an episode of several. Each branch is a sample; a node shared by branches is trained in the first
    one.

    Source: verifiers 0.4.0, `v1/trace.py`, `v1/graph.py`, `v1/utils/trace_store.py`.
    """
    number = 1
    for trace in record["traces"] if "nodes" not in record else [record]:
        for sample in _branches(trace, row, number):
            yield sample
            number = sample.number + 1


def _branches(record: Record, row: int, first: int) -> Iterator[Sample]:
    """first: number of the first sample."""
    nodes: list[Any] = record["nodes"]
    calls = {call["node"]: call for call in record.get("calls") or () if call.get("node") is not None}
    parents = {node.get("parent") for node in nodes}
    trained: set[int] = set()
    has_fault = bool(record.get("errors")) and not record.get("ok")
    scores = [one for one in (record.get("rewards") or {}).values() if one is not None]
    reward = sum(score["score"] * score.get("weight", 1.0) for score in scores)
    for number, leaf in enumerate((one for one in range(len(nodes)) if one not in parents), start=first):
        path: list[int] = []
        at: int | None = leaf
        while at is not None and at not in path:
            path.insert(0, at)
            at = nodes[at].get("parent")
        sample = _branch(row, number, nodes, path, trained, calls)
        trained.update(path)
        if not len(sample.ids):
            continue
        if not np.isfinite(reward):
            sample.add("reward_invalid", None, f"reward {reward}")
        elif has_fault and scores and reward == 0.0 and sample.mask.any():
            sample.add("fault_scored", None, f"it ended by {record['errors'][-1]['type']}, and its reward is 0")
        modalities = [int(one) for one in record.get("mm_token_type_id_map") or ()]
        messages = [nodes[one]["message"] for one in path]
        if has_images(messages) and not np.isin(sample.ids, modalities).any():
            sample.add("pixels_missing", None, "images in its messages, no id of theirs in the row")
        yield sample


def _branch(
    row: int, number: int, nodes: list[Any], path: list[int], trained: set[int], calls: dict[int, Any]
) -> Sample:
    ids = [as_ids(nodes[one]["token_ids"]) for one in path]
    masks = [as_ids(nodes[one]["mask"]) for one in path]
    whole = np.concatenate(ids)
    sample = Sample(
        row=row,
        number=number,
        ids=whole,
        mask=np.zeros(len(whole), np.bool_),
        logprobs=np.zeros(len(whole)),
        num_prompt=0,
        is_rounded=True,
    )
    start = 0
    for index, node_ids, marks in zip(path, ids, masks, strict=True):
        if index not in trained:
            _node(sample, start, len(node_ids), marks == 1, nodes[index], calls.get(index))
        start += len(node_ids)
    sample.num_prompt = int(np.argmax(sample.mask)) if sample.mask.any() else len(whole)
    return sample


def _node(sample: Sample, start: int, num: int, mask: Any, node: Record, call: Any) -> None:
    if len(mask) != num:
        sample.add("lengths", start, f"{len(mask)} mask values for {num} tokens of a node")
        return
    sample.mask[start : start + num] = mask
    values, num_sampled = as_floats(node.get("logprobs") or ()), int(mask.sum())
    places = start + np.flatnonzero(mask)
    if len(values) == num_sampled and sample.logprobs is not None:
        sample.logprobs[places] = values
    else:
        sample.add("lengths", start, f"{len(values)} log-probs for {num_sampled} sampled tokens of a node")
        sample.logprobs = None
    if num_sampled and not node.get("sampled"):
        sample.add("context_trained", int(places[0]), "no model call produced this message, and it is trained")
    usage = (call or {}).get("usage")
    if usage and num_sampled:
        _count(sample, int(places[0]), usage.get("completion_tokens"), num_sampled)
        read = usage["prompt_tokens"] + (usage.get("cached_input_tokens") or 0)
        if read != int(places[0]):
            sample.add("context_length", int(places[0]), f"the engine read {read} tokens, the row has {int(places[0])}")


def _count(sample: Sample, at: int, counted: Any, num: int) -> None:
    if counted is not None and counted != num:
        kind = "tokens_dropped" if counted > num else "tokens_doubled"
        sample.add(kind, at, f"{counted} tokens by the engine's count, {num} in the record")


def atif_trajectory(record: Record, row: int) -> Iterator[Sample]:
    """Steps with token ids, including sub-agents' trajectories. A row of `gangline data --kind atif` contains one.

    Source: Harbor's RFC 0001, ATIF v1.7.
    """
    yield from _steps(record.get("trajectory", record), row, [0])


def _steps(record: Record, row: int, count: list[int]) -> Iterator[Sample]:
    session = f"row {row} {record.get('trajectory_id') or record.get('session_id')}"
    shows_images = False
    for step in record["steps"]:
        shows_images = shows_images or has_images([{"content": step.get("message")}])
        metrics = step.get("metrics") or {}
        if metrics.get("completion_token_ids") is None or step.get("is_copied_context"):
            continue
        count[0] += 1
        prompt = metrics.get("prompt_token_ids")
        sample = streamed(
            row=row,
            number=count[0],
            prompt=prompt,
            response=metrics["completion_token_ids"],
            logprobs=metrics.get("logprobs"),
            session=session,
        )
        sample.is_call = prompt is not None
        _count(sample, sample.num_prompt, metrics.get("completion_tokens"), len(sample.ids) - sample.num_prompt)
        counted = metrics.get("prompt_tokens")
        if prompt is not None and counted is not None and counted != sample.num_prompt:
            sample.add("context_length", 0, f"the engine read {counted} tokens, the step has {sample.num_prompt}")
        if shows_images:
            sample.add("pixels_missing", None, "images in its messages, none in the step")
        yield sample
    for inner in record.get("subagent_trajectories") or ():
        yield from _steps(inner, row, count)
