"""Commands that run tasks for a purpose: `eval`, `compare`, `regrade`, `fork`, `serve`. Start with `evaluate`."""
