"""The reward of a session: 1 if answer.txt has the word in the drawer, else 0."""

import json
import os
from pathlib import Path

if __name__ == "__main__":
    expected = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())["metadata"]
    answer = Path("answer.txt").read_text().strip() if Path("answer.txt").is_file() else ""
    value = float(answer == expected["word"])
    Path("reward.json").write_text(json.dumps({"reward": value, "answer": answer, "expected": expected}))
