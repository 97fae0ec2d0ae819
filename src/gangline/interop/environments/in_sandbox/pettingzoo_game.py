"""One game of a PettingZoo environment (AEC): the agent plays one seat, random players play the others.

A step's reward is the one that `last()` returns at the seat's next turn, so it includes the effect of the others'
moves.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from .episode import Episode
from .protocol import Refused, Result
from .spaces import action_of, schema_of, text_of


class PettingZooEpisode(Episode):
    """An action that is in the space but illegal in the game is left to the environment to judge."""

    def __init__(self, config: dict[str, Any]) -> None:
        module = import_module(config["module"])
        self._env: Any = module.env(**config["options"])
        self._env.reset(seed=config["seed"])
        agents: list[str] = list(self._env.possible_agents)
        self._seat: str = config["seat"] or agents[0]
        if self._seat not in agents:
            raise ValueError(f"there is no seat {self._seat!r}; there are: {', '.join(agents)}")
        for number, agent in enumerate(agents):  # seeds the random players like a usual caller
            self._env.action_space(agent).seed(config["seed"] + number)
        space = self._env.action_space(self._seat)
        super().__init__(schema_of(space), shows_rewards=config["show_rewards"], about="Make your move.")
        seen, self._before, self.is_over = self._until_turn()
        self.instructions = (
            f"You play {config['module'].rpartition('.')[2]} as {self._seat} by the tool `step`; the others are:"
            f" {', '.join(agent for agent in agents if agent != self._seat) or 'none'}.\nActions: {space}\n"
            f"You see: {seen}"
        )

    def _step(self, action: Any) -> Result:
        if self.is_over:
            raise Refused("the game was over before your first turn")
        self._env.step(action_of(self._env.action_space(self._seat), action))
        seen, reward, done = self._until_turn()
        reward, self._before = reward + self._before, 0.0
        return Result(seen, reward, done)

    def _until_turn(self) -> tuple[str, float, bool]:
        """Let the others move. Returns the seat's observation, its reward since its last turn, and if it is out."""
        while self._env.agents:
            agent = self._env.agent_selection
            observation, reward, terminated, truncated, info = self._env.last()
            is_out = bool(terminated or truncated)
            if agent == self._seat:
                return self._seen(observation, info), float(reward), is_out
            self._env.step(None if is_out else self._random_move(agent, observation, info))
        return "", 0.0, True

    def _random_move(self, agent: str, observation: Any, info: Any) -> Any:
        mask = _mask(observation, info)
        space = self._env.action_space(agent)
        return space.sample() if mask is None else space.sample(mask)

    def _seen(self, observation: Any, info: Any) -> str:
        mask = _mask(observation, info)
        has_mask_inside = isinstance(observation, dict) and "action_mask" in observation
        seen = text_of(observation["observation"] if has_mask_inside else observation)
        if mask is None:
            return seen
        legal = [number for number, is_legal in enumerate(mask) if is_legal]
        return f"{seen}\nLegal actions: {legal}"

    def _finish(self, answer: str) -> Result:
        self._env.close()
        return super()._finish(answer)


def _mask(observation: Any, info: dict[str, Any]) -> Any:
    """The legal actions, if the environment provides them."""
    if isinstance(observation, dict) and "action_mask" in observation:
        return cast("dict[str, Any]", observation)["action_mask"]
    return info.get("action_mask")


begin = PettingZooEpisode
