"""An agent on smolagents: it writes Python that calls its one tool, and ends with `final_answer`."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, tool


@tool
def read_file(name: str) -> str:
    """Return the text of a file.

    Args:
        name: Name of the file.
    """
    with open(name) as file:
        return file.read().strip()


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    temperature=0.7,
)
agent = CodeAgent(tools=[read_file], model=model, max_steps=4, verbosity_level=0)
print(agent.run(sys.argv[1]))
