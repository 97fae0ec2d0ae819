"""A command writes the reward, and what it is given of the agent's runtime. Start with `evaluator`."""
