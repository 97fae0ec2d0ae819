"""Engines of a trainer that answer the nodes: its client as a `Sampler`, served over HTTP, given to every node.

For trainers that start their engines themselves, update their weights themselves, and offer a call that turns prompt
ids into sampled ids.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast
from urllib.parse import urlsplit

from pydantic import Field

from gangline.domain.errors import EngineIncapable, EngineMalformed, EngineUnavailable, GanglineError, InvalidRequest
from gangline.domain.views import NodeView, ServiceStatus
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import UNKNOWN_VERSION, FinishReason, PauseMode, SampledToken, SampleRequest
from gangline.models.language.contract import ChatTokenizer
from gangline.settings.machine import Settings, read_secret
from gangline.train.options import TrainingOptions
from gangline.train.weights.fleet import nodes_in
from gangline.wire.client.node import NodeClient
from gangline.wire.http.same_origin import OwnNames

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0


class EngineSettings(TrainingOptions):
    """Where a trainer's engine is served, and for which service."""

    url: str
    """URL of the rollout server."""
    token_env: str | None = None
    """Name of the environment variable, in the trainer's processes, with the server's control token; None is
    GANGLINE_TOKEN.
    """
    model_name: str = "policy"
    """Name under which agents call the model."""
    host: str = "127.0.0.1"
    """Address at which the trainer's engines are served to the nodes."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    public_url: str | None = None
    """URL of that address for nodes on other machines. None: this machine's address, if `host` is 0.0.0.0."""
    ready_within_s: float = Field(default=300.0, gt=0)
    """Seconds until a node must have accepted the engine."""

    def token(self) -> str | None:
        """Raises: InvalidRequest if the variable is not set."""
        return Settings.from_environ().control_token if self.token_env is None else read_secret(self.token_env)


class Sampling(TrainingOptions):
    """The distribution that sessions are sampled from."""

    temperature: float
    top_p: float
    top_k: int
    """0 means no limit."""
    max_tokens: int
    """Limit per reply."""

    def in_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The task with this as its `capture.sampling`: agents can only shorten replies."""
        fixed = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        rules: dict[str, Any] = {name: {"override": value} for name, value in fixed.items()}
        rules |= {name: {"override": 0.0} for name in ("presence_penalty", "frequency_penalty")}
        capture = cast("Mapping[str, Any]", task.get("capture") or {})
        given = cast("Mapping[str, Any]", capture.get("sampling") or {})
        return {**task, "capture": {**capture, "sampling": {**given, **rules, "max_tokens": {"max": self.max_tokens}}}}


@dataclass(frozen=True)
class Reply:
    """The answer of a trainer's engine to one call."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    """Under the sampled distribution; None if the engine gave none."""
    versions: Sequence[int]
    finish_reason: FinishReason


class OwnEngine:
    """A `gangline.models.engine_server.sampler.Sampler` over a trainer's client. The trainer manages the weights, so
    the control methods refuse.
    """

    trainer: ClassVar[str]
    no_logprobs: ClassVar[str] = "ask it for them"
    """The remedy if it gives no log-probs."""

    def __init__(self, tokenizer: ChatTokenizer, *, model_name: str, context_length: int, num_ids: int) -> None:
        """context_length: tokens of prompt and reply together. num_ids: rows of the model's vocabulary."""
        self.model_name = model_name
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.num_ids = num_ids
        self.returns_masks = False
        self.weight_version = UNKNOWN_VERSION

    @abstractmethod
    async def reply(self, request: SampleRequest) -> Reply:
        """Ask the trainer's engine once."""
        raise NotImplementedError

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Tokens are yielded once a reply is complete. Raises: InvalidRequest, EngineIncapable, EngineMalformed."""
        self.refuse_top_logprobs(request)
        reply = await self.reply(request)
        tokens = self.checked(reply)
        for number, (token_id, logprob, version) in enumerate(tokens, 1):
            is_last = number == len(tokens) and reply.finish_reason != "abort"
            yield SampledToken(token_id, logprob, version, reply.finish_reason if is_last else None)

    def refuse_top_logprobs(self, request: SampleRequest) -> None:
        """Raises: InvalidRequest."""
        if request.num_top_logprobs:
            raise InvalidRequest(f"{self.trainer}'s engines report no top_logprobs.")

    def checked(self, reply: Reply) -> list[tuple[int, float, int]]:
        """(id, log-prob, version) of each token. Raises: EngineIncapable, EngineMalformed."""
        if not reply.ids:
            return []
        if reply.logprobs is None:
            raise EngineIncapable(f"{self.trainer}'s engine gives no log-probs: {self.no_logprobs}.")
        if not len(reply.ids) == len(reply.logprobs) == len(reply.versions):
            raise EngineMalformed(
                f"{self.trainer} gave {len(reply.ids)} tokens, {len(reply.logprobs)} log-probs and "
                f"{len(reply.versions)} versions."
            )
        self.weight_version = max(self.weight_version, reply.versions[-1])  # an older call can end later
        return list(zip(reply.ids, reply.logprobs, reply.versions, strict=True))

    async def pause(self, mode: PauseMode) -> None:
        raise InvalidRequest(f"{self.trainer} pauses its engines itself.")

    async def resume(self) -> None:
        raise InvalidRequest(f"{self.trainer} resumes its engines itself.")

    async def load_weights(self, path: Path) -> None:
        raise InvalidRequest(f"{self.trainer} loads weights into its engines itself.")

    async def set_version(self, version: int) -> None:
        raise InvalidRequest(f"{self.trainer} counts versions itself.")

    async def close(self) -> None:
        return None


def num_rows(model: str) -> int:
    """Rows of the vocabulary of a transformers model. model: its folder or name."""
    auto: Any = importlib.import_module("transformers").AutoConfig  # it needs an extra, and seconds
    return int(auto.from_pretrained(model).get_text_config().vocab_size)


class Roster(Protocol):
    """A list of nodes, such as `gangline.wire.client.ServerClient`."""

    async def status(self) -> ServiceStatus: ...


@asynccontextmanager
async def answering(
    engine: OwnEngine, roster: Roster, settings: EngineSettings, *, is_only: bool = True
) -> AsyncGenerator[str]:
    """Inside the block the engine answers the nodes of the service. Yields its URL, once a node has it.

    is_only: the trainer has no other engine of this name; nodes then forget others, which an ended trainer left.

    Raises: PortUnavailable, EngineUnavailable.
    """
    async with served(engine, settings) as url:
        keeper = _NodeKeeper(roster, url, settings, is_only)
        await keeper.first()
        keeping = asyncio.create_task(keeper.keep())
        try:
            yield url
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def served(engine: OwnEngine, settings: EngineSettings) -> AsyncGenerator[str]:
    """Yields the URL for the nodes. Raises: PortUnavailable."""
    public = settings.public_url
    if public is None and settings.host in ("0.0.0.0", "::"):
        public = f"http://{_own_address()}"
    app = create_app(engine, dev_mode=False, names=OwnNames(settings.host, public_url=public))
    async with serving(app, host=settings.host, port=settings.port) as url:
        if public is None:
            yield url
        else:
            has_port = urlsplit(public).port is not None
            yield public.rstrip("/") if has_port else f"{public.rstrip('/')}:{urlsplit(url).port}"


def _own_address() -> str:
    """This machine's address on its way out. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of nobody, RFC 5737
        return probe.getsockname()[0]


class _NodeKeeper:
    """Registers the engine with every node of the service, including nodes that join later."""

    def __init__(self, roster: Roster, url: str, settings: EngineSettings, is_only: bool) -> None:
        """url: the engine's."""
        self._roster = roster
        self._token = settings.token()
        self._url = url
        self._settings = settings
        self._is_only = is_only

    async def first(self) -> None:
        """Wait until a node samples from the engine. Raises: EngineUnavailable, with the last problem."""
        why = "no node is there"
        try:
            async with asyncio.timeout(self._settings.ready_within_s):
                while True:
                    num_served, problem = await self.look()
                    if num_served:
                        return
                    why = problem or why
                    await asyncio.sleep(_LOOK_EVERY_S / 4)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"no node of {self._settings.url} took the trainer's engine at {self._url} in "
                f"{self._settings.ready_within_s:g} s ({why}). Start nodes that reach this address "
                "(`host`, `public_url`), without engines of their own."
            ) from error

    async def keep(self) -> None:
        """Run forever."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> tuple[int, str | None]:
        """The number of nodes that have the engine, and the last problem. Raises: NotAllowed, see `nodes_in`."""
        try:
            status = await self._roster.status()
        except GanglineError as error:
            return 0, str(error)
        answers = await asyncio.gather(*(self._give(node) for node in nodes_in(status)))
        return sum(problem is None for problem in answers), next(
            (answer for answer in answers if answer is not None), None
        )

    async def _give(self, node: NodeView) -> str | None:
        """Returns the problem, if any."""
        try:
            async with NodeClient(node.url, self._token) as client:
                for backend in await client.backends():
                    if backend.role is not None:
                        continue
                    if backend.url == self._url:
                        return None
                    is_left_over = self._is_only or backend.state == "unhealthy"
                    if is_left_over and backend.model == self._settings.model_name:
                        await client.remove_backend(backend.backend_id, drain=False)
                await client.add_backend(self._url, kind="vllm")
        except GanglineError as error:
            _log.warning("trainer.node_without_engine node=%s message=%s", node.node_id, error)
            return f"node {node.node_id}: {error}"
        _log.info("trainer.node_has_engine node=%s url=%s", node.node_id, self._url)
        return None
