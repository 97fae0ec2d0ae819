"""An agent on Pydantic AI: it looks into a file with one command, then says the word in it."""

import os
import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, SystemPromptPart, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel

# One worked example: without it, a small model never answers with a bare command.
EXAMPLE: list[ModelMessage] = [
    ModelRequest(
        [SystemPromptPart("You read files for the user."), UserPromptPart("Which word is in the file notes.txt?")]
    ),
    ModelResponse([TextPart("cat notes.txt")]),
    ModelRequest([UserPromptPart("river")]),
    ModelResponse([TextPart("river")]),
]
agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), model_settings={"temperature": 0.7})

look = agent.run_sync(sys.argv[1], message_history=EXAMPLE, model_settings={"max_tokens": 12})
done = subprocess.run(look.output, shell=True, capture_output=True, text=True, timeout=10)
seen = (done.stdout + done.stderr).strip()[:200] or "(no output)"
print(agent.run_sync(seen, message_history=look.all_messages(), model_settings={"max_tokens": 6}).output)
