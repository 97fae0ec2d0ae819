"""AReaL: a rollout workflow whose episodes are sessions of the service.

    class Workflow(SessionWorkflow, RolloutWorkflow): ...

AReaL calls `arun_episode` once for each sample of a prompt, with its client of the engines, and stacks the tensors of a
group. The sessions' calls go through that client, which pauses them around weight updates, goes on with aborted ones,
and tells the version of each token.

Laws, in addition to the contract (`gangline.train.trainers.contract`): AReaL compares `n_samples` consecutive rows, so
a session must be one trace. An episode never returns None: AReaL would compare the rest of the group without it. It
raises, and AReaL rejects the whole group.

Source: AReaL, github.com/inclusionAI/AReaL at 4aef98d (1.0.4), `areal/api/workflow_api.py`, `areal/api/io_struct.py`,
`areal/infra/remote_inf_engine.py`, `areal/infra/workflow_executor.py`, `areal/utils/data.py`.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.sampler import SampleRequest
from gangline.models.language.tokenizer import load_tokenizer
from gangline.train.trainers.contract import TrainerRow
from gangline.train.trainers.episodes import episodes
from gangline.train.trainers.own_engine import EngineSettings, OwnEngine, Reply, Sampling, num_rows

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""


class ArealEngine(OwnEngine):
    trainer = "AReaL"

    def __init__(self, engine: Any, gconfig: Any, *given: Any, **model: Any) -> None:
        """engine: AReaL's client. gconfig: its `GenerationHyperparameters`. model: as for `OwnEngine`."""
        super().__init__(*given, **model)
        self._engine = engine
        self._gconfig = gconfig

    async def reply(self, request: SampleRequest) -> Reply:
        """AReaL has no seeds: that of a request, which engines keep as well as they can, is left out."""
        if request.presence_penalty or request.min_tokens:
            raise InvalidRequest("AReaL's engines take neither presence_penalty nor min_tokens.")
        make: Any = importlib.import_module("areal.api.io_struct").ModelRequest
        prompt = list(request.prompt_ids)
        response = await self._engine.agenerate(
            make(
                rid=request.session_id or uuid4().hex,  # AReaL keeps calls of one id at one engine
                input_ids=prompt,
                gconfig=self._gconfig.new(
                    n_samples=1,
                    max_tokens=len(prompt) + request.max_tokens,
                    max_new_tokens=request.max_tokens,
                    greedy=request.temperature == 0,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k or self._gconfig.top_k,
                    frequency_penalty=request.frequency_penalty,
                    stop_token_ids=sorted(request.stop_ids),
                    stop=None,
                ),
            )
        )
        reason = "length" if response.stop_reason == "length" else "stop"
        return Reply(response.output_tokens, response.output_logprobs, response.output_versions, reason)


class SessionWorkflow:
    """Derive a workflow from this and AReaL's `RolloutWorkflow`."""

    def __init__(self, gconfig: Any, tokenizer_path: str, url: str, **settings: Any) -> None:
        """gconfig, tokenizer_path: AReaL's. url: the rollout server's. settings: other fields of `EngineSettings`.

        Raises: InvalidRequest if AReaL would sample from a part of the vocabulary, or greedily.
        """
        if gconfig.greedy or gconfig.temperature <= 0 or gconfig.top_p != 1 or gconfig.top_k < _EVERY_ID:
            raise InvalidRequest(
                "AReaL trains with log-probs of the whole vocabulary: set gconfig.greedy to false, gconfig.temperature "
                f"above 0, gconfig.top_p to 1, and gconfig.top_k to {_EVERY_ID}, its default."
            )
        self.episodes = episodes(url, **settings)
        self._gconfig = gconfig
        self._tokenizer_path = tokenizer_path

    @abstractmethod
    def task_of(self, data: dict[str, Any]) -> Mapping[str, Any]:
        """The task of an item of AReaL's dataset, without id and number of samples."""
        raise NotImplementedError

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        """One row of tensors. Raises: InvalidRequest if the settings do not fit, and as `Episodes.row`."""
        gconfig = self._gconfig
        if gconfig.temperature != 1 and "vllm" in type(getattr(engine, "backend", engine)).__name__.lower():
            raise InvalidRequest(
                "AReaL's vLLM gives log-probs of temperature 1, whatever it samples at: set gconfig.temperature to 1, "
                "or take SGLang."
            )

        def make_engine(settings: EngineSettings) -> ArealEngine:
            return ArealEngine(
                engine,
                gconfig,
                load_tokenizer(self._tokenizer_path),
                model_name=settings.model_name,
                context_length=gconfig.max_tokens,
                num_ids=num_rows(self._tokenizer_path),
            )

        sampling = Sampling(temperature=gconfig.temperature, top_p=1.0, top_k=0, max_tokens=gconfig.max_new_tokens)
        return _tensors(await self.episodes.row(self.task_of(data), sampling, make_engine))


_EVERY_ID = 100_000_000
"""Default of AReaL's `top_k`."""


def _tensors(row: TrainerRow) -> dict[str, Any]:
    """[1, T], as AReaL's own workflows: log-probs and masks at the place of their token. T ends with the last trained
    token: what follows teaches nothing, and AReaL puts the reward on the last token, where no mask may hide it.
    """
    import torch  # noqa: PLC0415 - it needs an extra

    length = int(np.flatnonzero(row.loss_mask)[-1]) + 1

    def whole(prompt: Any, response: Any, dtype: Any) -> Any:
        before = np.broadcast_to(prompt, len(row.prompt_ids))
        return torch.from_numpy(np.concatenate([before, response[:length]])).to(dtype)[None]

    return {
        "input_ids": whole(row.prompt_ids, row.response_ids, torch.int32),
        "attention_mask": torch.ones((1, len(row.prompt_ids) + length), dtype=torch.bool),
        "loss_mask": whole(0, row.loss_mask, torch.int32),
        "logprobs": whole(0, row.logprobs, torch.float32),
        "versions": whole(-1, row.versions, torch.int32),
        "rewards": torch.tensor([row.reward], dtype=torch.float32),
    }
