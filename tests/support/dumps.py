"""Clean records of every form, and faults planted into them. `row_forms` and `call_forms` cite the shapes' sources."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

__all__ = ["CLEAN", "EOS", "PLANTS", "Conversation", "conversation", "kept_ids"]

EOS = 2
Record = dict[str, Any]


class Conversation:
    """Turns that continue each other: (new context, sampled ids, log-probs)."""

    def __init__(self, turns: list[tuple[list[int], list[int], list[float]]], name: str) -> None:
        self.turns, self.name = turns, name

    @property
    def prompt(self) -> list[int]:
        return self.turns[0][0]

    def response(self) -> tuple[list[int], list[int], list[float]]:
        """Ids, mask and log-probs after the first prompt."""
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for number, (context, sampled, values) in enumerate(self.turns):
            if number:
                ids, mask, logprobs = ids + context, mask + [0] * len(context), logprobs + [0.0] * len(context)
            ids, mask, logprobs = ids + sampled, mask + [1] * len(sampled), logprobs + values
        return ids, mask, logprobs

    def calls(self) -> list[tuple[list[int], list[int], list[float]]]:
        """(whole prompt, sampled ids, log-probs) of each turn."""
        found: list[tuple[list[int], list[int], list[float]]] = []
        stream: list[int] = []
        for context, sampled, values in self.turns:
            stream = stream + context
            found.append((stream, sampled, values))
            stream = stream + sampled
        return found


def conversation(chance: random.Random, *, num_turns: int | None = None, zeros: float = 0.02) -> Conversation:
    """Sampled turns end with EOS; some log-probs are exactly 0.0, as a confident model's are."""
    turns: list[tuple[list[int], list[int], list[float]]] = []
    for _ in range(num_turns or chance.randint(1, 5)):
        num = chance.randint(1, 60)
        sampled = [chance.randint(10, 900) for _ in range(num)] + [EOS]
        values = [0.0 if chance.random() < zeros else -chance.expovariate(2.0) - 1e-4 for _ in sampled]
        turns.append(([chance.randint(10, 900) for _ in range(chance.randint(2, 30))], sampled, values))
    return Conversation(turns, f"{chance.getrandbits(64):016x}")


def gangline(talk: Conversation) -> Record:
    ids, mask, logprobs = talk.response()
    kept, num_routed = kept_ids(ids, mask), len(talk.prompt) + len(ids) - 1
    return {
        "trace_id": talk.name,
        "session_id": talk.name,
        "outcome": "completed",
        "reward": 1.0,
        "prompt_ids": talk.prompt,
        "response_ids": ids,
        "loss_mask": mask,
        "response_logprobs": logprobs,
        "response_versions": [3 if one else -1 for one in mask],
        "untrainable": None,
        "splices": [],
        "prompt_messages": [],
        "sampling_mask": {"num_tokens": len(ids), "data": _base64([*map(len, kept), *_flat(kept)], "<i4")},
        "routed_experts": {
            "num_tokens": num_routed,
            "num_layers": 2,
            "num_chosen": 3,
            "number": "uint8",
            "data": _base64([7] * (num_routed * 6), "u1"),
        },
    }


def kept_ids(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Each sampled token was drawn among itself and its neighbours."""
    return [[max(one - 1, 0), one, one + 1] if sampled else [] for one, sampled in zip(ids, mask, strict=True)]


def _flat(lists: list[list[int]]) -> list[int]:
    return [one for kept in lists for one in kept]


def _base64(numbers: list[int], number: str) -> str:
    return base64.b64encode(np.array(numbers, number).tobytes()).decode()


def trl(talk: Conversation) -> Record:
    ids, mask, logprobs = talk.response()
    num = len(talk.prompt)
    return {
        "prompt": [{"role": "user", "content": "x"}],
        "completion": [],
        "input_ids": talk.prompt + ids,
        "completion_mask": [0] * num + mask,
        "old_log_probs": [0.0] * num + logprobs,
        "advantage": 0.5,
        "model_version": 1,
        "group_id": 0,
        "metrics": {},
    }


def slime(talk: Conversation) -> Record:
    ids, mask, logprobs = talk.response()
    kept = kept_ids(ids, mask)
    return {
        "tokens": talk.prompt + ids,
        "response_length": len(ids),
        "loss_mask": mask,
        "rollout_log_probs": logprobs,
        "reward": 1.0,
        "status": "completed",
        "weight_versions": ["1", "1", "2"],
        "session_id": talk.name,
        "remove_sample": False,
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "spec_info": {"completion_token_num": 0},
        "rollout_top_p_token_ids": _flat(kept),
        "rollout_top_p_token_offsets": [0, *itertools.accumulate(map(len, kept))],
        "rollout_routed_experts": [[[7, 8, 9]] * 2 for _ in range(len(talk.prompt) + len(ids) - 1)],
    }


def verl(talk: Conversation) -> Record:
    ids, mask, logprobs = talk.response()
    return {
        "prompts": talk.prompt,
        "responses": ids,
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "attention_mask": [1] * (len(talk.prompt) + len(ids)),
        "extra_fields": {"min_global_steps": 1, "max_global_steps": 2},
        "multi_modal_inputs": {},
    }


def openenv(talk: Conversation) -> Record:
    return {
        "schema_version": 1,
        "turns": [
            {
                "node_id": f"{talk.name}-{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": sampled,
                "per_token_logps": values,
                "loss_mask": [0] * len(prompt) + [1] * len(sampled),
                "request": {"messages": []},
                "response": {},
                "metadata": {},
            }
            for number, (prompt, sampled, values) in enumerate(talk.calls())
        ],
    }


def nemo_gym(talk: Conversation) -> Record:
    output = [
        {
            "type": "message",
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": values,
        }
        for prompt, sampled, values in talk.calls()
    ]
    return {"responses_create_params": {"input": []}, "response": {"output": output}, "reward": 1.0}


def verifiers(talk: Conversation) -> Record:
    nodes: list[Record] = []
    calls: list[Record] = []
    for context, sampled, values in talk.turns:
        num_prompt = sum(len(node["token_ids"]) for node in nodes) + len(context)
        for is_sampled, ids, logprobs in ((False, context, []), (True, sampled, values)):
            nodes.append(
                {
                    "parent": len(nodes) - 1 if nodes else None,
                    "message": {"role": "assistant" if is_sampled else "user", "content": "x"},
                    "sampled": is_sampled,
                    "token_ids": ids,
                    "mask": [is_sampled] * len(ids),
                    "logprobs": logprobs,
                }
            )
        usage = {"prompt_tokens": num_prompt, "completion_tokens": len(sampled)}
        calls.append({"node": len(nodes) - 1, "usage": usage})
    return {
        "id": talk.name,
        "task": {},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"one": {"score": 1.0}},
        "errors": [],
        "ok": True,
        "mm_token_type_id_map": {},
    }


def atif(talk: Conversation) -> Record:
    steps = [
        {
            "step_id": number,
            "source": "agent",
            "message": "x",
            "metrics": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(sampled),
                "prompt_token_ids": prompt,
                "completion_token_ids": sampled,
                "logprobs": values,
            },
        }
        for number, (prompt, sampled, values) in enumerate(talk.calls(), start=1)
    ]
    return {"schema_version": "ATIF-v1.7", "session_id": talk.name, "agent": {"name": "x"}, "steps": steps}


CLEAN: dict[str, Callable[[Conversation], Record]] = {
    "gangline": gangline,
    "trl": trl,
    "slime": slime,
    "verl": verl,
    "openenv": openenv,
    "nemo_gym": nemo_gym,
    "verifiers": verifiers,
    "atif": atif,
}


def _arrays(form: str, record: Record) -> tuple[Record, str, str, str]:
    """The last call, or the row: (its map, names of ids, log-probs and mask)."""
    if form == "openenv":
        return record["turns"][-1], "completion_token_ids", "per_token_logps", "loss_mask"
    if form == "nemo_gym":
        return record["response"]["output"][-1], "generation_token_ids", "generation_log_probs", ""
    if form == "verifiers":
        return record["nodes"][-1], "token_ids", "logprobs", "mask"
    if form == "atif":
        return record["steps"][-1]["metrics"], "completion_token_ids", "logprobs", ""
    return {
        "gangline": (record, "response_ids", "response_logprobs", "loss_mask"),
        "trl": (record, "input_ids", "old_log_probs", "completion_mask"),
        "slime": (record, "tokens", "rollout_log_probs", "loss_mask"),
        "verl": (record, "responses", "rollout_log_probs", "response_mask"),
    }[form]


def _logprob(value: float) -> Callable[[str, list[Record]], None]:
    def plant(form: str, records: list[Record]) -> None:
        where, _, logprobs, _ = _arrays(form, records[1])
        where[logprobs][-2] = value

    return plant


def _short(form: str, records: list[Record]) -> None:
    where, _, logprobs, _ = _arrays(form, records[1])
    del where[logprobs][-1]


def _zeros(form: str, records: list[Record]) -> None:
    where, _, logprobs, _ = _arrays(form, records[1])
    where[logprobs] = [0.0] * len(where[logprobs])


def _negative_id(form: str, records: list[Record]) -> None:
    where, ids, _, _ = _arrays(form, records[1])
    where[ids] = [*where[ids][:-2], -100, where[ids][-1]]


def _twice(_form: str, records: list[Record]) -> None:
    records.append(deepcopy(records[1]))


def _shifted(form: str, records: list[Record]) -> None:
    where, _, logprobs, _ = _arrays(form, records[1])
    where[logprobs] = [0.0, *where[logprobs][:-1]]


def _unmasked_context(form: str, records: list[Record]) -> None:
    where, _, _, mask = _arrays(form, records[1])
    if form == "openenv":
        where[mask][0] = 1
    else:
        records[1]["nodes"][0]["mask"][0] = True
        records[1]["nodes"][0]["logprobs"] = [-0.5]


def _masked_sampled(form: str, records: list[Record]) -> None:
    where, _, _, mask = _arrays(form, records[1])
    where[mask][-4:-1] = [0, 0, 0]


def _doubled(form: str, records: list[Record]) -> None:
    where, ids, logprobs, mask = _arrays(form, records[1])
    num = 40
    where[ids] = [*where[ids], *where[ids][-num:]]
    where[logprobs] = [*where[logprobs], *where[logprobs][-num:]]
    if mask:
        where[mask] = [*where[mask], *where[mask][-num:]]
    if form == "slime":
        where["response_length"] += num
    if form == "verl":
        where["attention_mask"] += [1] * num
    if form == "gangline":
        where["response_versions"] += [3] * num


def _dropped(form: str, records: list[Record]) -> None:
    where, ids, logprobs, mask = _arrays(form, records[1])
    if form == "slime":
        where["spec_info"]["completion_token_num"] = len(where[ids]) + 1
    elif form == "nemo_gym":
        num = sum(len(one["generation_token_ids"]) for one in records[1]["response"]["output"])
        records[1]["response"]["usage"] = {"output_tokens": num}
        del where[ids][-3:], where[logprobs][-3:]
    else:
        del where[ids][-3:], where[logprobs][-3:]
        if mask:
            del where[mask][-3:]


def _padded(form: str, records: list[Record]) -> None:
    where, ids, logprobs, mask = _arrays(form, records[1])
    where[ids], where[logprobs] = where[ids] + [0] * 40, where[logprobs] + [0.0] * 40
    if mask:
        where[mask] = where[mask] + [1] * 40
    if form == "slime":
        where["response_length"] += 40
    if form == "verl":
        where["attention_mask"] += [0] * 40


def _splice(form: str, records: list[Record]) -> None:
    """The last call's prompt holds another rendering of the turn before it."""
    if form == "gangline":
        records[1]["splices"] = [{"completion_id": "c", "at": 1, "cause": "bpe_merge"}]
    elif form == "verifiers":
        records[1]["nodes"][-3]["token_ids"].pop()
        records[1]["nodes"][-3]["mask"].pop()
        records[1]["nodes"][-3]["logprobs"].pop()
    else:
        where = _arrays(form, records[1])[0]
        prompt = list(where["prompt_token_ids"])
        at = len(_before(form, records[1])) + 1
        where["prompt_token_ids"] = [*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]]


def _before(form: str, record: Record) -> list[int]:
    calls = {"openenv": lambda: record["turns"], "nemo_gym": lambda: record["response"]["output"]}
    found = calls[form]() if form in calls else [step["metrics"] for step in record["steps"]]
    return found[-2]["prompt_token_ids"]


def _retry(form: str, records: list[Record]) -> None:
    calls = records[1]["turns" if form == "openenv" else "steps"]
    again = deepcopy(calls[-1])
    where = again if form == "openenv" else again["metrics"]
    ids = "completion_token_ids"
    where[ids] = [one + 1 for one in where[ids]]
    again["node_id"] = "again"
    calls.append(again)


def _images(form: str, records: list[Record]) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}]
    message = [{"role": "user", "content": content}]
    if form == "gangline":
        records[1]["prompt_messages"] = message
    elif form == "trl":
        records[1]["prompt"] = message
    elif form == "slime":
        records[1]["multimodal_inputs"] = {"images": ["x"]}
    elif form == "verl":
        records[1]["raw_prompt"] = message
    elif form == "openenv":
        records[1]["turns"][-1]["request"]["messages"] = message
    elif form == "nemo_gym":
        records[1]["responses_create_params"]["input"] = message
    elif form == "verifiers":
        records[1]["nodes"][0]["message"]["content"] = content
    else:
        records[1]["steps"].insert(0, {"step_id": 0, "source": "user", "message": [{"type": "image"}]})


def _versions(form: str, records: list[Record]) -> None:
    if form == "gangline":
        marks = records[1]["loss_mask"]
        records[1]["response_versions"] = [9 - min(index, 8) if one else -1 for index, one in enumerate(marks)]
    elif form == "slime":
        records[1]["weight_versions"] = ["7", "3"]
    else:
        records[1]["extra_fields"] = {"min_global_steps": 5, "max_global_steps": 2}


def _fault(form: str, records: list[Record]) -> None:
    if form == "gangline":
        records[1] |= {"outcome": "infra_error", "reward": 0.0}
    elif form == "slime":
        records[1] |= {"status": "failed", "reward": 0.0}
    else:
        error = {"type": "ProviderError", "message": "x"}
        records[1] |= {"errors": [error], "ok": False, "rewards": {"one": {"score": 0.0}}}


def _reward(form: str, records: list[Record]) -> None:
    if form == "verifiers":
        records[1]["rewards"]["one"]["score"] = float("nan")
    else:
        records[1][{"trl": "advantage", "verl": "reward_score"}.get(form, "reward")] = float("nan")


_ALL = tuple(CLEAN)
_ROWS = ("gangline", "trl", "slime", "verl")
_REPLAYS = ("gangline", "slime")
_MASKS = (*_ROWS, "openenv")


def _masks(change: Callable[[list[list[int]], list[int]], list[list[int]]]) -> Callable[[str, list[Record]], None]:
    """change: (kept ids of the response's tokens, its loss mask) -> others."""

    def plant(form: str, records: list[Record]) -> None:
        record = records[1]
        num = len(record["loss_mask"])
        ids = record["response_ids"] if form == "gangline" else record["tokens"][-num:]
        kept = change(kept_ids(ids, record["loss_mask"]), record["loss_mask"])
        if form == "gangline":
            data = _base64([*map(len, kept), *_flat(kept)], "<i4")
            record["sampling_mask"] = {"num_tokens": len(kept), "data": data}
        else:
            record["rollout_top_p_token_ids"] = _flat(kept)
            record["rollout_top_p_token_offsets"] = [0, *itertools.accumulate(map(len, kept))]

    return plant


def _lost_set(kept: list[list[int]], mask: list[int]) -> list[list[int]]:
    at = mask.index(1) + 1
    return [*kept[:at], [], *kept[at + 1 :]]


def _cut_mask(form: str, records: list[Record]) -> None:
    """Fewer kept ids than are counted."""
    if form == "gangline":
        given = records[1]["sampling_mask"]
        given["data"] = base64.b64encode(base64.b64decode(given["data"])[:-4]).decode()
    else:
        del records[1]["rollout_top_p_token_ids"][-1]


def _lost_experts(form: str, records: list[Record]) -> None:
    if form == "gangline":
        given = records[1]["routed_experts"]
        given["num_tokens"] -= 1
        given["data"] = base64.b64encode(base64.b64decode(given["data"])[:-6]).decode()
    else:
        del records[1]["rollout_routed_experts"][0]


def _changed_experts(form: str, records: list[Record]) -> None:
    if form == "gangline":
        given = records[1]["routed_experts"]
        given["data"] = base64.b64encode(base64.b64decode(given["data"])[:-1]).decode()
    else:
        records[1]["rollout_routed_experts"][1] = [[7, 8]] * 2


def _unknown_mask(_form: str, records: list[Record]) -> None:
    records[1]["sampling_mask"] = {"num_tokens": 0, "data": "", "missing": "the engine reported no sampling mask"}


PLANTS: dict[str, tuple[Callable[[str, list[Record]], None], dict[str, set[str]]]] = {
    "a log-prob is NaN": (_logprob(float("nan")), {key: {"logprob_nan"} for key in _ALL}),
    "a log-prob is positive": (_logprob(0.7), {key: {"logprob_positive"} for key in _ALL}),
    "a log-prob is -9999": (_logprob(-9999.0), {key: {"logprob_sentinel"} for key in _ALL}),
    "a log-prob is missing": (_short, {key: {"lengths"} for key in _ALL}),
    "all log-probs are zero": (_zeros, {key: {"logprobs_zero"} for key in _ALL}),
    "an id is -100": (_negative_id, {key: {"ids_invalid"} for key in _ALL}),
    "log-probs are shifted": (_shifted, {key: {"logprobs_shifted"} for key in _ROWS}),
    "a row is there twice": (_twice, {key: {"trained_twice"} for key in _ALL}),
    "tokens are doubled": (_doubled, {key: {"tokens_doubled"} for key in _ALL}),
    "tokens are dropped": (_dropped, {key: {"tokens_dropped"} for key in ("slime", "nemo_gym", "verifiers", "atif")}),
    "padding is trained": (_padded, {key: {"padding_trained"} for key in _ALL}),
    "sampled tokens became context": (_masked_sampled, {key: {"sampled_as_context"} for key in _MASKS}),
    "context is trained": (_unmasked_context, {key: {"context_trained"} for key in ("openenv", "verifiers")}),
    "a context is spliced": (
        _splice,
        {key: {"splice"} for key in ("gangline", "openenv", "nemo_gym", "atif")}
        | {"verifiers": {"context_length", "tokens_dropped"}},
    ),
    "a retry is trained": (_retry, {key: {"retry_trained"} for key in ("openenv", "atif")}),
    "pixels are missing": (_images, {key: {"pixels_missing"} for key in _ALL}),
    "kept ids are shifted": (_masks(lambda kept, _: [[], *kept[:-1]]), {key: {"masks_wrong"} for key in _REPLAYS}),
    "kept ids of a token are lost": (_masks(_lost_set), {key: {"masks_wrong"} for key in _REPLAYS}),
    "kept ids of the end are lost": (_masks(lambda kept, _: kept[:-1]), {key: {"masks_wrong"} for key in _REPLAYS}),
    "kept ids are cut": (_cut_mask, {key: {"masks_wrong"} for key in _REPLAYS}),
    "kept ids are unknown": (_unknown_mask, {"gangline": {"evidence_missing"}}),
    "experts of a token are lost": (_lost_experts, {key: {"experts_wrong"} for key in _REPLAYS}),
    "experts change in number": (_changed_experts, {key: {"experts_wrong"} for key in _REPLAYS}),
    "versions fall": (_versions, {key: {"versions_backwards"} for key in ("gangline", "slime", "verl")}),
    "a fault is scored zero": (_fault, {key: {"fault_scored"} for key in ("gangline", "slime", "verifiers")}),
    "a reward is NaN": (
        _reward,
        {key: {"reward_invalid"} for key in ("gangline", "trl", "slime", "verl", "verifiers")},
    ),
}
"""Fault -> (how it is planted into the second of some records, form -> kinds of which one must be found)."""
