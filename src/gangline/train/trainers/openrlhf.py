"""OpenRLHF: an agent executor whose samples are sessions of the service, for `--train.agent_func_path`.

    class AgentExecutor(SessionExecutor, AgentExecutorBase): ...

OpenRLHF calls `execute` once for each sample of a prompt, in the process of a vLLM engine, and makes one experience of
what it returns. The sessions' calls are answered by OpenRLHF's own engines, all of which the nodes get.

Laws, in addition to the contract (`gangline.train.trainers.contract`): OpenRLHF counts `n_samples_per_prompt`
consecutive experiences, so a session must be one trace. It cuts rows at `max_len` without a word, so no call sees or
samples beyond it. Its engines do not tell the version of their weights, and its experiences have no place for it.

Source: OpenRLHF, github.com/OpenRLHF/OpenRLHF at 3c3be62, `openrlhf/utils/agent.py`,
`openrlhf/trainer/ray/vllm_engine.py`, `openrlhf/trainer/ppo_utils/samples_generator.py`. Imports nothing of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from gangline.domain.errors import EngineMalformed, InvalidGroup, InvalidRequest
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.models.engine_server.sampler import UNKNOWN_VERSION, FinishReason, SampleRequest
from gangline.models.language.tokenizer import load_tokenizer
from gangline.train.trainers.contract import TrainerRow
from gangline.train.trainers.episodes import episodes
from gangline.train.trainers.own_engine import EngineSettings, OwnEngine, Reply, Sampling, num_rows

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""

_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)


class OpenRLHFEngine(OwnEngine):
    trainer = "OpenRLHF"

    def __init__(self, llm_engine: Any, sampling_params: Any, *given: Any, **model: Any) -> None:
        """llm_engine: the actor that `execute` gets. sampling_params: one of vLLM's. model: as for `OwnEngine`."""
        super().__init__(*given, **model)
        self._llm_engine = llm_engine
        self._make_params = cast("Any", type(sampling_params))

    async def reply(self, request: SampleRequest) -> Reply:
        params = self._make_params(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            stop_token_ids=sorted(request.stop_ids),
            skip_special_tokens=False,
            logprobs=1,
        )
        answer = await self._llm_engine.generate(list(request.prompt_ids), params)
        if answer is None:
            raise EngineMalformed("OpenRLHF's engine ended a call without an answer.")
        output = answer.outputs[0]
        ids = list(output.token_ids)
        logprobs = None
        if output.logprobs is not None:
            logprobs = [table[token_id].logprob for token_id, table in zip(ids, output.logprobs, strict=True)]
        reason: FinishReason = output.finish_reason if output.finish_reason in ("length", "abort") else "stop"
        return Reply(ids, logprobs, [UNKNOWN_VERSION] * len(ids), reason)


class SessionExecutor:
    """Derive `AgentExecutor` from this and OpenRLHF's `AgentExecutorBase`, in the file of `--train.agent_func_path`."""

    def __init__(self, url: str, **settings: Any) -> None:
        """url: the rollout server's. settings: other fields of `EngineSettings`."""
        self.episodes = episodes(url, **settings)

    @abstractmethod
    def task_of(self, prompt: str, label: Any) -> Mapping[str, Any]:
        """The task of a prompt of OpenRLHF's dataset, without id and number of samples."""
        raise NotImplementedError

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """OpenRLHF's output of one sample.

        Raises: InvalidRequest if the settings do not fit, and as `Episodes.row`; OpenRLHF then ends its training.
        """
        if sampling_params.logprobs is None:
            raise InvalidRequest(
                "OpenRLHF's engines give log-probs of the sampled distribution only with "
                "--algo.advantage.is_correction_enable: set it."
            )
        if images:
            raise InvalidRequest("images of OpenRLHF's dataset do not reach sessions: put them into the task.")

        def make_engine(settings: EngineSettings) -> OpenRLHFEngine:
            return OpenRLHFEngine(
                llm_engine,
                sampling_params,
                load_tokenizer(hf_tokenizer.name_or_path),
                model_name=settings.model_name,
                context_length=max_length,
                num_ids=num_rows(hf_tokenizer.name_or_path),
            )

        sampling = Sampling(
            temperature=sampling_params.temperature,
            top_p=sampling_params.top_p,
            top_k=max(sampling_params.top_k, 0),
            max_tokens=sampling_params.max_tokens or max_length,
        )
        row = await self.episodes.row(self.task_of(prompt, label), sampling, make_engine)
        return _output(row, prompt, label, max_length)


def _output(row: TrainerRow, prompt: str, label: Any, max_length: int) -> dict[str, Any]:
    """Raises: InvalidGroup if OpenRLHF would cut the row."""
    start, length = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
    if length > max_length:
        raise InvalidGroup(
            f"{row.trace_id} has {length} tokens, and OpenRLHF would cut it at {max_length}: raise --data.max_len."
        )
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask != 0, [0]]).astype(np.int8))) + start
    return {
        "prompt": prompt,
        "label": label,
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        "action_ranges": [(first, end) for first, end in edges.reshape(-1, 2).tolist()],
        "rollout_log_probs": [*[0.0] * start, *row.logprobs.tolist()],
        "truncated": row.outcome in _CUT_SHORT or row.trace.finish_reason == "length",
        "reward": row.reward,
        "scores": row.session_reward,
        "extra_logs": {"turns": float(len(row.trace.spans))},
    }
