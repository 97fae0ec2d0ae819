"""Games of Gymnasium, PettingZoo and TextArena, and questions of reasoning-gym, in sessions.

Each package judges: it is stepped directly, with the same seed and actions, in its own Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compared import same
from support.node.environments import calls_of, directly, need_python, played, step_rewards, using

# Value iteration over the transition table, then the greedy policy on the ice that slips.
FROZEN_LAKE = """
import gymnasium
env = gymnasium.make("FrozenLake-v1", **given["options"])
table, value = env.unwrapped.P, [0.0] * 16
gain = lambda state, action: sum(p * (r + 0.99 * value[s] * (not end)) for p, s, r, end in table[state][action])
for _ in range(500):
    value = [max(gain(state, action) for action in range(4)) for state in range(16)]
state, _ = env.reset(seed=given["seed"])
actions, rewards, over = [], [], False
while not over:
    actions.append(max(range(4), key=lambda action: gain(state, action)))
    state, reward, terminated, truncated, _ = env.step(actions[-1])
    rewards.append(float(reward))
    over = terminated or truncated
result = {"actions": actions, "rewards": rewards}
"""

# Box actions and dense rewards.
PENDULUM = """
import gymnasium
env = gymnasium.make("Pendulum-v1", **given["options"])
state, _ = env.reset(seed=given["seed"])
actions, rewards = [], []
for number in range(5):
    actions.append([float(max(-2, min(2, -2 * state[2]))) if number else 0.5])
    state, reward, *_ = env.step(env.action_space.from_jsonable([actions[-1]])[0])
    rewards.append(float(reward))
result = {"actions": actions, "rewards": rewards}
"""

# The best move by search, against players that draw legal moves by the same seeds.
TIC_TAC_TOE = """
from functools import cache
from pettingzoo.classic import tictactoe_v3
LINES = [(0,1,2),(3,4,5),(6,7,8),(0,3,6),(1,4,7),(2,5,8),(0,4,8),(2,4,6)]
@cache
def best(board, mover):
    for a, b, c in LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return (1 if board[a] == 1 else -1), None
    free = [cell for cell in range(9) if not board[cell]]
    if not free:
        return 0, None
    tried = [(best(board[:cell] + (mover,) + board[cell + 1:], -mover)[0], cell) for cell in free]
    return (max if mover == 1 else min)(tried)
env = tictactoe_v3.env(**given["options"])
env.reset(seed=given["seed"])
for number, agent in enumerate(env.possible_agents):
    env.action_space(agent).seed(given["seed"] + number)
seat, actions, rewards = given["seat"], [], []
for agent in env.agent_iter():
    seen, reward, terminated, truncated, _ = env.last()
    if agent == seat and actions:
        rewards.append(float(reward))
    if terminated or truncated:
        env.step(None)
        continue
    planes = seen["observation"].reshape(9, 2)
    mine = 1 if seat == env.possible_agents[0] else -1
    board = tuple(mine if own else -mine if others else 0 for own, others in planes)
    if agent == seat:
        actions.append(best(board, mine)[1])
        env.step(actions[-1])
    else:
        env.step(env.action_space(agent).sample(seen["action_mask"]))
result = {"actions": actions, "rewards": rewards}
"""

# Bisection by the game's hints.
GUESS = """
import textarena
env = textarena.make("GuessTheNumber-v0", **given["options"])
env.reset(num_players=1, seed=given["seed"])
low, high, actions, done = 1, 20, [], False
while not done:
    env.get_observation()
    guess = (low + high) // 2
    actions.append(f"I say [{guess}]")
    done, _ = env.step(action=actions[-1])
    hint = env.state.game_state["guess_history"]
    if hint and hint[-1][1] == "lower":
        high = guess - 1
    else:
        low = guess + 1
result = {"actions": actions, "rewards": [0.0] * (len(actions) - 1) + [float(env.close()[0][0])]}
"""

# Two players, the second by a function that the environment's Python imports.
NIM_OF_TWO = """
import textarena
env = textarena.make("TicTacToe-v0")
env.reset(num_players=2, seed=given["seed"])
mine, others, actions, done = iter("048"), iter("125"), [], False
while not done:
    player, _ = env.get_observation()
    move = f"[{next(mine if player == 0 else others)}]"
    if player == 0:
        actions.append(move)
    done, _ = env.step(action=move)
result = {"actions": actions, "rewards": [0.0] * (len(actions) - 1) + [float(env.close()[0][0])]}
"""
OPPONENT = """
moves = iter("125")

def play(observation):
    assert "Tic Tac Toe" in observation
    return f"[{next(moves)}]"
"""

QUESTION = """
import reasoning_gym
dataset = reasoning_gym.create_dataset(given["dataset"], seed=given["seed"], size=given["index"] + 1)
entry = dataset[given["index"]]
result = {"question": entry["question"], "answer": entry["answer"],
          "scores": {text: float(dataset.score_answer(text, entry)) for text in (entry["answer"], "no idea", "")}}
"""


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_GYMS", "gyms", "gymnasium", "pettingzoo", "pygame", "textarena", "reasoning_gym")


LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "seed": 42, "options": {"render_mode": "ansi"}}


@pytest.mark.parametrize(
    ("kind", "code", "config", "total"),
    [
        ("gymnasium", FROZEN_LAKE, LAKE, 1.0),
        ("gymnasium", PENDULUM, {"id": "Pendulum-v1", "seed": 2}, None),
        ("pettingzoo", TIC_TAC_TOE, {"module": "pettingzoo.classic.tictactoe_v3", "seed": 1}, 1.0),
        (
            "pettingzoo",
            TIC_TAC_TOE,
            {"module": "pettingzoo.classic.tictactoe_v3", "seed": 1, "seat": "player_2"},
            None,
        ),
        ("textarena", GUESS, {"id": "GuessTheNumber-v0", "seed": 3}, 1.0),
    ],
    ids=["lake", "pendulum", "tictactoe", "tictactoe-second", "guess"],
)
async def test_rewards_are_those_of_the_package_stepped_directly(
    tmp_path: Path,
    python: str,
    kind: str,
    code: str,
    config: dict[str, Any],
    total: float | None,
) -> None:
    seat = {"seat": config.get("seat", "player_1")}
    judge = directly(python, code, **({"options": {}} | config | seat))
    actions = [{"action": action} for action in judge["actions"]]
    result = await played(tmp_path, {"kind": kind, "config": config}, using(actions), python=python)
    assert result.outcome == "completed", result.failure
    key = (config.get("id", str(config)), "played")
    same(kind, {key: judge["rewards"]}, {key: step_rewards(result)})
    assert result.reward == pytest.approx(sum(judge["rewards"]), abs=1e-12)
    assert total in (None, result.reward)
    assert result.trajectory is not None
    spans = result.trajectory.traces[0].spans
    assert [span.score for span in spans] == [*judge["rewards"], None], "each turn has its step's reward"
    assert [call.completion_id for call in calls_of(result)] == [span.completion_id for span in spans[:-1]]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gymnasium", LAKE),
        ("pettingzoo", {"module": "pettingzoo.classic.tictactoe_v3"}),
        ("textarena", {"id": "GuessTheNumber-v0"}),
    ],
)
async def test_an_agent_that_takes_no_step_earns_nothing(
    tmp_path: Path, python: str, kind: str, config: dict[str, Any]
) -> None:
    result = await played(tmp_path, {"kind": kind, "config": config}, using([]), python=python)
    assert (result.outcome, result.reward, calls_of(result)) == ("completed", 0.0, []), result.failure
    assert result.trajectory is not None
    assert "You play" in str(said := result.trajectory.traces[0].prompt_messages) or "You act" in str(said)


async def test_another_player_is_a_function_of_the_environments_python(tmp_path: Path, python: str) -> None:
    judge = directly(python, NIM_OF_TWO, seed=0)
    config = {"id": "TicTacToe-v0", "num_players": 2, "opponent": "opponent:play"}
    prepare = [{"type": "write", "path": "opponent.py", "content": OPPONENT}]
    runtime = {"backend": "sandbox", "python": python, "network": "none", "prepare": prepare}
    actions = [{"action": action} for action in judge["actions"]]
    result = await played(tmp_path, {"kind": "textarena", "config": config, "runtime": runtime}, using(actions))
    assert (step_rewards(result), result.reward) == (judge["rewards"], 1.0), result.failure


async def test_the_example_of_the_guide_crosses_the_lake(tmp_path: Path, python: str) -> None:
    example = json.loads((Path(__file__).parents[2] / "examples/environments/frozen_lake.json").read_text())
    environment = example["environments"].pop("lake")
    environment["runtime"]["python"] = python
    del example["num_samples"], example["environments"]
    right = [{"action": action} for action in (1, 1, 2, 2, 1, 2)]
    result = await played(tmp_path, environment, using(right), **example)
    assert (result.reward, result.reward_details["done"]) == (1.0, True), result.failure


async def test_actions_that_are_none_are_refused_and_change_nothing(tmp_path: Path, python: str) -> None:
    wrong = [{"action": 4}, {"action": "left"}, {"action": [1, 2]}, {"action": True}, {"move": 1}]
    judge = directly(python, FROZEN_LAKE, **LAKE)
    right = [{"action": action} for action in judge["actions"]]
    environment = {"kind": "gymnasium", "config": LAKE}
    result = await played(tmp_path, environment, using([*wrong, *right, right[0]]), python=python)
    assert step_rewards(result) == [None] * 4 + judge["rewards"] + [None], "a call without its argument is not made"
    assert (result.reward, result.reward_details["num_errors"]) == (1.0, 5)
    assert calls_of(result)[-1].text.startswith("The episode is over")


async def test_a_question_is_scored_by_its_dataset(tmp_path: Path, python: str) -> None:
    config = {"dataset": "basic_arithmetic", "seed": 11, "index": 3}
    judge = directly(python, QUESTION, **config)
    environment = {"kind": "reasoning_gym", "config": config}
    for text, said in ((judge["answer"], f"I think.\n<answer>{judge['answer']}</answer>"), ("no idea", "no idea")):
        result = await played(tmp_path / text, environment, using([], said), python=python)
        assert (result.outcome, result.reward) == ("completed", judge["scores"][text]), result.failure
        assert result.trajectory is not None
        assert judge["question"] in str(result.trajectory.traces[0].prompt_messages[-1].parts)


async def test_a_seed_means_one_question_in_all_sessions(tmp_path: Path, python: str) -> None:
    """This dataset draws from sets, whose order is another one in each process of Python that is not told otherwise."""
    environment = {"kind": "reasoning_gym", "config": {"dataset": "polynomial_multiplication", "seed": 11}}
    asked = set[str]()
    for number in range(4):
        result = await played(tmp_path / str(number), environment, using([], "no idea"), python=python)
        assert result.trajectory is not None, result.failure
        asked.add(str(result.trajectory.traces[0].prompt_messages[-1].parts))
    assert len(asked) == 1
