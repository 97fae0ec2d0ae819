"""A small shell agent: it shows its model a task, runs what the model says, and hands in its answer.

It speaks to whatever `OPENAI_BASE_URL` points at, with nothing but the standard library. Three styles of the same loop:

    plain   the reply's last line is a command, or `answer X`
    fenced  the reply has one block of ```bash, and ends the task with `echo ANSWER X`, as mini-swe-agent's models do
    react   the reply ends with `Action: COMMAND` or `Final: X`, as in ReAct

Models may write notes before that.

    usage: agent.py STYLE INSTRUCTION [MODEL]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

MAX_TURNS = 8
MAX_TOKENS = 48
MAX_SHOWN_CHARS = 240
TEMPERATURE = 1.0

RULES = {
    "plain": "Reply with one command, or with: answer X",
    "fenced": "Reply with one block:\n```bash\nCOMMAND\n```\nTo end: echo ANSWER X",
    "react": "Reply with: Action: COMMAND\nTo end: Final: X",
}


def read_reply(style: str, text: str) -> tuple[str, str]:
    """What to do: ("run", command), ("answer", X), or ("wrong", what to tell the model)."""
    text = text.strip()
    if style == "plain":
        line = text.splitlines()[-1] if text else ""
        kind, what = ("answer", line[7:]) if line.startswith("answer ") else ("run", line)
    elif style == "fenced":
        blocks = re.findall(r"```bash\n(.*?)\n?```", text, re.DOTALL)
        if len(blocks) != 1:
            return "wrong", "error: one block of bash, please"
        block = blocks[0].strip()
        kind, what = ("answer", block[12:]) if block.startswith("echo ANSWER ") else ("run", block)
    else:
        found = re.search(r"(Action|Final): (.*)\Z", text, re.DOTALL)
        if found is None:
            return "wrong", "error: Action: or Final:, please"
        kind, what = ("answer" if found[1] == "Final" else "run"), found[2]
    what = what.strip()
    return (kind, what) if what else ("wrong", "error: an empty reply")


def observed(style: str, output: str, turn: int) -> str:
    """What the model is shown of a command. turn: the command's number, from 1."""
    forms = {"plain": "{}", "fenced": "<shell>\n{}\n</shell>", "react": "Observation: {}"}
    return f"{forms[style].format(f'output {turn}: {output}')}\nturn {turn + 1}"


def run(command: str) -> str:
    """Run a command here; its output, or why there is none."""
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=5, errors="replace")
    except subprocess.TimeoutExpired:
        return "error: it took too long"
    return (done.stdout + done.stderr).strip()[:MAX_SHOWN_CHARS] or "(no output)"


def ask(messages: list[dict[str, str]], model: str) -> str:
    body = {"model": model, "messages": messages, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def main() -> None:
    style, instruction = sys.argv[1:3]
    model = sys.argv[3] if len(sys.argv) > 3 else os.environ["OPENAI_MODEL"]
    messages = [{"role": "system", "content": RULES[style]}, {"role": "user", "content": instruction}]
    for turn in range(1, MAX_TURNS + 1):
        text = ask(messages, model)
        kind, what = read_reply(style, text)
        if kind == "answer":
            Path("answer.txt").write_text(what)
            return
        output = run(what) if kind == "run" else what
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observed(style, output, turn)}]


if __name__ == "__main__":
    main()
