"""tinker: its sampling client answers the nodes, and groups become `tinker.Datum`s for its training client.

    async with answering(engine, service, settings):
        await engine.sync(training_client, version)
        rows = to_data(await collector.collect(32), 8, algorithm("grpo"))
        await training_client.forward_backward([one.datum for one in rows], "importance_sampling")

A sampling client is a snapshot of the weights, so a call in flight ends with the weights that it began with, and each
token has the version of its client: no gate closes for an update.

Laws, in addition to the contract (`gangline.train.trainers.contract`): tinker's losses know no temperature, so tokens
are sampled at 1. They sum over tokens, so averages of the algorithm's loss do not count; weights of tokens are in their
advantages.

Source: tinker 0.38.0 (`SamplingClient.sample`, `TrainingClient.save_weights_and_get_sampling_client`, `Datum`), and
github.com/thinking-machines-lab/tinker-cookbook at 9dfcc3a, `tinker_cookbook/rl/data_processing.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import EngineUnavailable, InvalidRequest
from gangline.models.engine_server.sampler import SampleRequest
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask, Sample, make_samples, over_batch
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.own_engine import OwnEngine, Reply

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""


class TinkerEngine(OwnEngine):
    """Arguments: as for `OwnEngine`. Answers once `sync` or `use` has given it a client."""

    trainer = "tinker"
    _client: Any = None

    def use(self, client: Any, version: int) -> None:
        """Calls from now on go to this `SamplingClient`, whose weights are of this policy version."""
        self._client = client
        self.weight_version = version

    async def sync(self, training_client: Any, version: int) -> None:
        """Sample from the training client's weights. version: above all that the service has had."""
        self.use(await training_client.save_weights_and_get_sampling_client(), version)

    async def reply(self, request: SampleRequest) -> Reply:
        if self._client is None:
            raise EngineUnavailable("tinker has no sampling client yet: call `sync` before sessions start.")
        if request.presence_penalty or request.frequency_penalty or request.min_tokens:
            raise InvalidRequest("tinker takes neither penalties nor min_tokens.")
        client, version = self._client, self.weight_version
        types: Any = importlib.import_module("tinker").types
        params = types.SamplingParams(
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop=sorted(request.stop_ids),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
        )
        prompt = types.ModelInput.from_ints(list(request.prompt_ids))
        response = await client.sample(prompt=prompt, num_samples=1, sampling_params=params)
        [sequence] = response.sequences
        reason = "length" if sequence.stop_reason == "length" else "stop"
        return Reply(sequence.tokens, sequence.logprobs, [version] * len(sequence.tokens), reason)


class TinkerRow(NamedTuple):
    datum: Any
    """`tinker.Datum`: inputs are all ids but the last; `target_tokens`, `logprobs` and `advantages` belong to the ids
    after them, 0 where nothing is trained.
    """
    row: TrainerRow
    """Facts that a datum has no place for: versions, rewards, ids."""


def to_data(
    groups: Sequence[Group],
    num_samples: int,
    algorithm: Algorithm,
    *,
    mask: Mask = all_sampled,
    with_mask: bool = False,
) -> list[TinkerRow]:
    """A row per trace, in the order of groups, sessions and traces.

    num_samples: sessions per group. with_mask: add `mask`, which functions of tinker-cookbook read and take away before
    they train; tinker itself refuses it.

    Raises: InvalidGroup if a group is incomplete or not of temperature 1; InvalidRequest if the algorithm's advantages
    need a model.
    """
    algorithm.require_group_advantages("tinker")
    rows = [row for group in groups for row in rows_of(group, num_samples)]
    found = [sample for group in groups for sample in make_samples(group, algorithm, mask)]
    samples = over_batch(found, algorithm.advantage)
    return [TinkerRow(_datum(row, sample, with_mask), row) for row, sample in zip(rows, samples, strict=True)]


def _datum(row: TrainerRow, sample: Sample, with_mask: bool) -> Any:
    tinker: Any = importlib.import_module("tinker")
    ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)

    def of_targets(values: NDArray[Any]) -> NDArray[np.float32]:
        return np.concatenate([np.zeros(len(row.prompt_ids) - 1), values]).astype(np.float32)

    inputs = {
        "target_tokens": ids[1:],
        "logprobs": of_targets(row.logprobs),
        "advantages": of_targets(sample.advantages * sample.weights),
    }
    if with_mask:
        inputs["mask"] = of_targets(sample.weights)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)
