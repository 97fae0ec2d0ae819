"""An agent on the OpenAI Agents SDK: it looks into a file with one command, then says the word in it."""

import os
import subprocess
import sys

from agents import Agent, ModelSettings, Runner, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)  # traces would go to OpenAI

# One worked example: without it, a small model never answers with a bare command.
EXAMPLE = [
    {"role": "user", "content": "Which word is in the file notes.txt?"},
    {"role": "assistant", "content": "cat notes.txt"},
    {"role": "user", "content": "river"},
    {"role": "assistant", "content": "river"},
]


def reader(max_tokens: int) -> Agent:
    settings = ModelSettings(temperature=0.7, max_tokens=max_tokens)
    model = os.environ["OPENAI_MODEL"]
    return Agent(name="Reader", instructions="You read files for the user.", model=model, model_settings=settings)


look = Runner.run_sync(reader(12), [*EXAMPLE, {"role": "user", "content": sys.argv[1]}])
done = subprocess.run(look.final_output, shell=True, capture_output=True, text=True, timeout=10)
seen = (done.stdout + done.stderr).strip()[:200] or "(no output)"
print(Runner.run_sync(reader(6), [*look.to_input_list(), {"role": "user", "content": seen}]).final_output)
