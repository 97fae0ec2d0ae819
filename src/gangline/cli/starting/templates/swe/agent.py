"""A coding agent: it runs each block of ```bash that its model writes, and ends at a reply without one."""

import os
import re
import subprocess
import sys

from openai import OpenAI

messages = [
    {"role": "system", "content": "You repair programs. Reply with one command in a block of ```bash, or with: done"},
    {"role": "user", "content": sys.argv[1]},
]
client = OpenAI()

for _ in range(8):
    reply = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages, temperature=0.7, max_tokens=200
    )
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    if not (blocks := re.findall(r"```bash\n(.*?)```", text, re.DOTALL)):
        break
    done = subprocess.run(blocks[0], shell=True, capture_output=True, text=True, timeout=30)
    messages.append({"role": "user", "content": (done.stdout + done.stderr)[-1000:] or "(no output)"})
