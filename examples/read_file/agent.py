"""A small agent: it may look at one file through one command, then must say the word in it.

It speaks to whatever `OPENAI_BASE_URL` points at, and knows nothing of who answers there.

    usage: agent.py QUESTION [MODEL]
"""

import os
import shlex
import subprocess
import sys

from openai import OpenAI

ALLOWED = ("cat", "head", "tail")
TEMPERATURE = 0.7
COMMAND_TOKENS = 12
ANSWER_TOKENS = 6

SYSTEM = "You read files for the user."
# One worked example: without it, a small model never answers with a bare command.
EXAMPLE = [
    {"role": "user", "content": "Which word is in the file notes.txt?"},
    {"role": "assistant", "content": "cat notes.txt"},
    {"role": "user", "content": "river"},
    {"role": "assistant", "content": "river"},
]


def run_allowed(command: str) -> str:
    """Run one allowed command on one file in this folder; what it printed, or why it was not run."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if len(words) != 2 or words[0] not in ALLOWED or "/" in words[1] or words[1].startswith("-"):
        return f"error: not one of: {', '.join(f'{name} FILE' for name in ALLOWED)}"
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).strip()[:200]


def main() -> None:
    question = sys.argv[1]
    model = sys.argv[2] if len(sys.argv) > 2 else os.environ["OPENAI_MODEL"]
    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": question}]

    def ask(max_tokens: int) -> str:
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=TEMPERATURE, max_tokens=max_tokens
        )
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        return text

    messages.append({"role": "user", "content": run_allowed(ask(COMMAND_TOKENS))})
    print(ask(ANSWER_TOKENS))


if __name__ == "__main__":
    main()
