"""Commands that run or grade tasks: `eval`, `compare`, `regrade`, `fork`. Start with `evaluate`."""
