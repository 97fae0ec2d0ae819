"""Commands about evaluations: `eval` makes one, `compare` compares two. Start with `evaluate`."""
