"""An agent: it looks into a file with one command, then says the word in it. It knows nothing of Gangline."""

import os
import subprocess
import sys

from openai import OpenAI

# One worked example: without it, a small model never answers with a bare command.
messages = [
    {"role": "system", "content": "You read files for the user."},
    {"role": "user", "content": "Which word is in the file notes.txt?"},
    {"role": "assistant", "content": "cat notes.txt"},
    {"role": "user", "content": "river"},
    {"role": "assistant", "content": "river"},
    {"role": "user", "content": sys.argv[1]},
]
client = OpenAI()


def ask(max_tokens: int) -> str:
    reply = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages, temperature=0.7, max_tokens=max_tokens
    )
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


done = subprocess.run(ask(12), shell=True, capture_output=True, text=True, timeout=10)
messages.append({"role": "user", "content": (done.stdout + done.stderr).strip()[:200] or "(no output)"})
print(ask(6))
