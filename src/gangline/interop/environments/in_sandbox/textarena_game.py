"""One game of TextArena: the agent plays one seat, a function plays the others.

TextArena gives rewards only when a game is closed, so the last step carries the seat's reward. A game that the agent
leaves early gets the reward that `close` returns then, or 0.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .episode import Episode
from .protocol import Result


class TextArenaEpisode(Episode):
    """An action is text, in the form that the game's players write."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({"type": "string"}, shows_rewards=config["show_rewards"], about="Make your move.")
        self._seat: int = config["seat"]
        self._others = _function(config["opponent"])
        self._env: Any = import_module("textarena").make(config["id"], **config["options"])
        self._env.reset(num_players=config["num_players"], seed=config["seed"])
        self._seen = ""
        self.is_over, text = self._until_turn()
        self.instructions = f"You play {config['id']} by the tool `step`.\n{text}"

    def _step(self, action: Any) -> Result:
        done, _ = self._env.step(action=str(action))
        text = ""
        if not done:
            done, text = self._until_turn()
        return Result(self._last_words(), self._reward(), True) if done else Result(text, 0.0)

    def _finish(self, answer: str) -> Result:
        """Close an unfinished game and return its reward; a finished game has already returned it."""
        if self._is_closed:
            return super()._finish(answer)
        return Result("closed", self._reward(), done=True)

    _is_closed = False

    def _reward(self) -> float:
        rewards: dict[int, float] | None = self._env.close()[0]
        self._is_closed = True
        return float((rewards or {}).get(self._seat, 0.0))

    def _until_turn(self) -> tuple[bool, str]:
        """Let the others move. Returns whether the game is over, and the new part of the seat's observation."""
        while True:
            player, observation = self._env.get_observation()
            if player == self._seat:
                return False, self._new(_text(observation))
            done, _ = self._env.step(action=self._others(_text(observation)))
            if done:
                return True, ""

    def _new(self, text: str) -> str:
        """The text without the part already seen: the usual wrappers repeat the whole game each time."""
        new = text.removeprefix(self._seen)
        self._seen = text
        return new.strip()

    def _last_words(self) -> str:
        return _text(self._env.state.observations.get(self._seat, [])).strip()


def _text(observation: Any) -> str:
    """The text of a wrapper, or of the messages (player, message, kind) of an environment without one."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message[1]) for message in observation)


def _function(name: str | None) -> Any:
    """Import `module:function`."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


begin = TextArenaEpisode
