"""One episode of self-play: a proposer asks for a sum, a solver answers. One model plays both, by two system prompts.

Each player is its own conversation, and names itself in the header `x-gangline-role`.

    usage: agent.py LIMIT
"""

import json
import os
import re
import sys
import urllib.request

PROPOSER = "You set sums for another player. Say one sum of two whole numbers, such as `12 + 30`, and nothing else."
SOLVER = "You solve sums. Say the result as digits, and nothing else."
TEMPERATURE = 1.0
MAX_TOKENS = 16


def ask(role: str, system: str, text: str) -> str:
    """The answer of the model in this role."""
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
    }
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
        "x-gangline-role": role,
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def main() -> None:
    question = ask("proposer", PROPOSER, f"Set a sum of numbers below {sys.argv[1]}.").strip()
    if re.fullmatch(r"\d+ \+ \d+", question):
        print(question, "=", ask("solver", SOLVER, f"What is {question}?").strip())


if __name__ == "__main__":
    main()
