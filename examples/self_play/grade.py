"""Grade one episode: the solver earns 1 for the right result, the proposer 1 for an allowed sum that is not solved.

What counts is what the model said in each role, as recorded on its way. The session's reward is the solver's; an
episode without an allowed sum has 0 for all.

    usage: grade.py LIMIT
"""

import json
import re
import sys
from pathlib import Path


def main() -> None:
    limit = int(sys.argv[1])
    traces = json.loads(Path(".gangline/trajectory.json").read_text())["traces"]
    said = {trace["agent_roles"][0]: trace["response_messages"][0]["content"].strip() for trace in traces}
    sum_of = re.fullmatch(r"(\d+) \+ (\d+)", said.get("proposer", ""))
    numbers = [int(number) for number in sum_of.groups()] if sum_of else []
    allowed = bool(numbers) and max(numbers) < limit
    solved = allowed and said.get("solver") == str(sum(numbers))
    rewards = {"proposer": float(allowed and not solved), "solver": float(solved)}
    result = {
        "reward": rewards["solver"],
        "trace_rewards": {trace["trace_id"]: rewards[trace["agent_roles"][0]] for trace in traces},
        "said": said,
        "allowed": allowed,
    }
    Path("reward.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
