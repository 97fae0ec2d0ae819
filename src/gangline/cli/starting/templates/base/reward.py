"""The reward of a session: 1 if the model's last answer is the word in the file, else 0."""

import json
import os
from pathlib import Path


def reward(answers: list[str], expected: dict) -> float:
    return float(bool(answers) and answers[-1].strip() == expected["word"])


if __name__ == "__main__":
    session = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())
    messages = [message for trace in session["traces"] for message in trace["response_messages"]]
    answers = [message.get("content") or "" for message in messages if message["role"] == "assistant"]
    value = reward(answers, session["metadata"])
    Path("reward.json").write_text(json.dumps({"reward": value, "answers": answers, "expected": session["metadata"]}))
