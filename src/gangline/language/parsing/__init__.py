"""What a model's reply text means: thinking, text, tool calls; incrementally, whoever sampled it."""
