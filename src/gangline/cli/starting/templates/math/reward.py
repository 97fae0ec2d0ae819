"""The reward of a session: 1 if the last number of the model's answer is right, else 0.

For formulas in LaTeX use the evaluator `math` instead, which compares expressions.
"""

import json
import os
import re
from pathlib import Path


def reward(answers: list[str], expected: dict) -> float:
    numbers = re.findall(r"-?\d+", answers[-1]) if answers else []
    return float(numbers[-1:] == [str(expected["answer"])])


if __name__ == "__main__":
    session = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())
    messages = [message for trace in session["traces"] for message in trace["response_messages"]]
    answers = [message.get("content") or "" for message in messages if message["role"] == "assistant"]
    value = reward(answers, session["metadata"])
    Path("reward.json").write_text(json.dumps({"reward": value, "answers": answers, "expected": session["metadata"]}))
