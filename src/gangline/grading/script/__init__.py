"""A command that writes the reward, and the files it receives from the agent's runtime. Start with `evaluator`."""
