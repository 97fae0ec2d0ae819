"""One episode of a Gymnasium environment."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .episode import Episode
from .protocol import Result
from .spaces import action_of, schema_of, text_of


class GymnasiumEpisode(Episode):
    """Rewards come from `Env.step`. Both `terminated` and `truncated` end the episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        for module in config["imports"]:  # packages register their environments when they are imported
            import_module(module)
        self._env: Any = import_module("gymnasium").make(config["id"], **config["options"])
        space = self._env.action_space
        super().__init__(schema_of(space), shows_rewards=config["show_rewards"])
        observation, _ = self._env.reset(seed=config["seed"], options=config["reset_options"])
        self.instructions = (
            f"You act in the environment {config['id']} by the tool `step`.\nActions: {space}\n"
            f"You see: {self._seen(observation)}"
        )

    def _step(self, action: Any) -> Result:
        observation, reward, terminated, truncated, _ = self._env.step(action_of(self._env.action_space, action))
        return Result(self._seen(observation), float(reward), bool(terminated or truncated))

    def _finish(self, answer: str) -> Result:
        self._env.close()
        return super()._finish(answer)

    def _seen(self, observation: Any) -> str:
        seen = text_of(observation)
        return f"{seen}\n{self._env.render()}" if self._env.render_mode == "ansi" else seen


begin = GymnasiumEpisode
