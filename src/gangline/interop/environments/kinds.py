"""Environment kinds, one class each: the user's configuration, and the command that serves the environment.

Environment packages are not dependencies of Gangline: the Python named by `python`, in the environment's own sandbox,
must have them. An episode is seeded with the task's seed, so all sessions of a group play the same episode.

A kind of ours runs a program of `in_sandbox/`, whose modules and configuration are read from stdin. No file of it is
written to the sandbox, and nothing of it appears in `/proc/PID/cmdline`, which every process there can read: the
configuration may contain the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gangline.domain.task_values import Environment

_INSIDE = Path(__file__).with_name("in_sandbox")
_SHARED = ("protocol", "episode", "server", "spaces")

_BOOTSTRAP = """\
import os, sys
if os.stat(".").st_uid != os.getuid():
    sys.path[:] = [path for path in sys.path if path]  # nothing that the agent left there is imported
import json
from importlib.machinery import ModuleSpec
def front(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            sys.exit("no configuration came")
        data += piece
    return data
given = json.loads(front(int.from_bytes(front(8), "big")))
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in given["modules"]:
            return ModuleSpec(name, Finder, is_package=name == "gangline_world")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        source = given["modules"][module.__name__]
        exec(compile(source, "<%s>" % module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder)
from importlib import import_module
from gangline_world.protocol import serve
serve(lambda: import_module(given["main"]).begin(given["config"]))
"""


def command(python: str) -> tuple[str, ...]:
    """The command that reads `opening` and then serves one environment on its standard streams."""
    return (python, "-c", _BOOTSTRAP)


def opening(name: str, config: Mapping[str, Any]) -> bytes:
    """The first bytes to write to the command's stdin. name: a module of `in_sandbox/` with `begin(config)`."""
    modules = {"gangline_world": "", **{f"gangline_world.{one}": _source(one) for one in (*_SHARED, name)}}
    given = json.dumps({"modules": modules, "main": f"gangline_world.{name}", "config": config}).encode()
    return len(given).to_bytes(8, "big") + given


@cache
def _source(name: str) -> str:
    return (_INSIDE / f"{name}.py").read_text(encoding="utf-8")


_FINISH = frozenset({"finish"})
_Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
_Function = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
_Command = Annotated[tuple[str, ...], Field(min_length=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class McpConfig(_Config):
    """Configuration of environments of kind `mcp`."""

    command: _Command
    """An MCP server program on its standard streams, with its arguments. Every process of the environment's sandbox can
    read the arguments.
    """
    env: Environment = Field(default_factory=dict)


class McpKind:
    """Any MCP server. A result has a reward if the server sets one in `_meta`, under `gangline/step`."""

    name: ClassVar[str] = "mcp"
    Config: ClassVar[type[BaseModel]] = McpConfig
    hidden_tools: ClassVar[frozenset[str]] = frozenset()
    offers_tools: ClassVar[bool] = True

    def __init__(self, config: McpConfig) -> None:
        self.command: tuple[str, ...] = config.command
        self.env: dict[str, str] = config.env


class _Episode(_Config):
    python: str = "python3"
    """Python in the environment's sandbox, 3.10 or newer, with the package installed."""
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function that makes the environment."""


class _Game(_Episode):
    show_rewards: bool = False
    """Whether the model sees each step's reward."""


class _Played:
    """Base of the kinds served by a program of `in_sandbox/`, with `step` for the agent and `finish` for the grader."""

    Config: ClassVar[type[BaseModel]]
    hidden_tools: ClassVar[frozenset[str]] = _FINISH
    offers_tools: ClassVar[bool] = True
    module: ClassVar[str]

    def __init__(self, config: _Episode) -> None:
        self.command: tuple[str, ...] = command(config.python)
        self.opening: bytes = opening(self.module, config.model_dump(mode="json"))
        self.env: dict[str, str] = {"PYTHONHASHSEED": "0"}  # some sample from sets: a seed alone is not enough


class GymnasiumConfig(_Game):
    """Configuration of environments of kind `gymnasium`."""

    id: str = Field(min_length=1)
    """Name for `gymnasium.make`, such as `FrozenLake-v1`. With the option `render_mode: ansi` the model also sees the
    rendered text.
    """
    imports: tuple[_Module, ...] = ()
    """Modules to import because they register environments."""
    reset_options: dict[str, Any] | None = None
    """`options` of `Env.reset`."""


class GymnasiumKind(_Played):
    """One episode of a Gymnasium environment."""

    name: ClassVar[str] = "gymnasium"
    Config: ClassVar[type[BaseModel]] = GymnasiumConfig
    module: ClassVar[str] = "gymnasium_game"


class PettingZooConfig(_Game):
    """Configuration of environments of kind `pettingzoo`."""

    module: _Module
    """Module with the function `env`, such as `pettingzoo.classic.tictactoe_v3`."""
    seat: str | None = None
    """Name of the agent's player; None: the first one. Random players take the other seats."""


class PettingZooKind(_Played):
    """One game of a PettingZoo environment."""

    name: ClassVar[str] = "pettingzoo"
    Config: ClassVar[type[BaseModel]] = PettingZooConfig
    module: ClassVar[str] = "pettingzoo_game"


class TextArenaConfig(_Game):
    """Configuration of environments of kind `textarena`."""

    id: str = Field(min_length=1)
    """Name for `textarena.make`."""
    num_players: int = Field(default=1, gt=0)
    seat: int = Field(default=0, ge=0)
    """Number of the agent's player."""
    opponent: _Function | None = None
    """`module:function` in the environment's Python that takes a player's observation and returns the move. It plays
    all other seats, and is required for games with several players.
    """

    def model_post_init(self, context: Any, /) -> None:
        if self.num_players > 1 and self.opponent is None:
            raise ValueError("a game of several players needs an opponent")
        if self.seat >= self.num_players:
            raise ValueError(f"there is no seat {self.seat} in a game of {self.num_players}")


class TextArenaKind(_Played):
    """One game of TextArena."""

    name: ClassVar[str] = "textarena"
    Config: ClassVar[type[BaseModel]] = TextArenaConfig
    module: ClassVar[str] = "textarena_game"


class ReasoningGymConfig(_Episode):
    """Configuration of environments of kind `reasoning_gym`."""

    dataset: str = Field(min_length=1)
    """Name for `reasoning_gym.create_dataset`."""
    index: int = Field(default=0, ge=0)
    """Number of the question in the dataset."""
    size: int | None = Field(default=None, gt=0)
    """Number of questions in the dataset; None: as many as `index` needs."""


class ReasoningGymKind(_Played):
    """One question of reasoning-gym. It has no tools: the agent just answers."""

    name: ClassVar[str] = "reasoning_gym"
    Config: ClassVar[type[BaseModel]] = ReasoningGymConfig
    module: ClassVar[str] = "reasoning_gym_task"
    offers_tools: ClassVar[bool] = False


class _Server(_Config):
    url: str = Field(default="http://127.0.0.1:8000", pattern=r"^https?://[^\s\x00]+$")
    """URL of the server, as seen from the environment's sandbox."""
    command: tuple[str, ...] = ()
    """Command that starts the server in the sandbox. Empty: it runs elsewhere and the sandbox's network reaches it."""
    start_seconds: float = Field(default=60.0, gt=0)
    """Seconds that the server may take to start."""


class NemoGymConfig(_Server):
    """Configuration of environments of kind `nemo_gym`."""

    python: str = "python3"
    """Python in the environment's sandbox, 3.10 or newer. It needs no package unless `command` does."""
    row: dict[str, Any]
    """A row of the server's dataset: `responses_create_params`, and the fields that `/seed_session` and `/verify` read.
    """

    @field_validator("row")
    @classmethod
    def _has_params(cls, row: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(row.get("responses_create_params"), dict):
            raise ValueError("a row of a NeMo Gym dataset has an object `responses_create_params`")
        return row


class NemoGymKind:
    """One session with a resources server of NeMo Gym."""

    name: ClassVar[str] = "nemo_gym"
    Config: ClassVar[type[BaseModel]] = NemoGymConfig
    hidden_tools: ClassVar[frozenset[str]] = _FINISH
    offers_tools: ClassVar[bool] = True

    def __init__(self, config: NemoGymConfig) -> None:
        self.command: tuple[str, ...] = command(config.python)
        self.opening: bytes = opening("nemo_gym_server", config.model_dump(mode="json"))
        self.env: dict[str, str] = {}


class OpenEnvConfig(_Server):
    """Configuration of environments of kind `openenv`."""

    python: str = "python3"
    """Python in the environment's sandbox, with the package `openenv` installed."""
    seed: int | None = None
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of `reset`, such as `episode_id`."""


class OpenEnvKind:
    """One session with an OpenEnv server."""

    name: ClassVar[str] = "openenv"
    Config: ClassVar[type[BaseModel]] = OpenEnvConfig
    hidden_tools: ClassVar[frozenset[str]] = frozenset({"state", "finish"})
    offers_tools: ClassVar[bool] = True

    def __init__(self, config: OpenEnvConfig) -> None:
        self.command: tuple[str, ...] = command(config.python)
        self.opening: bytes = opening("openenv_server", config.model_dump(mode="json"))
        self.env: dict[str, str] = {}


def _temperature_0() -> dict[str, Any]:
    return {"temperature": 0.0}


class Tau2Config(_Config):
    """Configuration of environments of kind `tau2`."""

    python: str = "python3"
    """Python in the environment's sandbox, with tau2-bench and its data installed."""
    domain: str = Field(min_length=1)
    """Name of the domain, such as `retail`."""
    task: str = Field(min_length=1)
    """Id of a task of the domain."""
    task_set: str | None = None
    """Name of the tau2 task set, such as `telecom_small`; None: the domain's own."""
    user_args: dict[str, Any] = Field(default_factory=_temperature_0)
    """LiteLLM arguments for the user's model calls."""
    judge_args: dict[str, Any] = Field(default_factory=_temperature_0)
    """LiteLLM arguments for the judge of `nl_assertions`."""
    max_steps: int = Field(default=200, gt=0)
    """Messages in the conversation, including tool results; a longer conversation gets reward 0."""
    max_errors: int = Field(default=10, gt=0)
    """Failed tool calls, including the user's."""


class Tau2Kind:
    """One tau2-bench conversation. The user is a second role, played by a model."""

    name: ClassVar[str] = "tau2"
    Config: ClassVar[type[BaseModel]] = Tau2Config
    hidden_tools: ClassVar[frozenset[str]] = _FINISH
    offers_tools: ClassVar[bool] = True

    def __init__(self, config: Tau2Config) -> None:
        self.command: tuple[str, ...] = command(config.python)
        self.opening: bytes = opening("tau2_talk", config.model_dump(mode="json"))
        self.env: dict[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LOGURU_LEVEL": "WARNING"}
