"""The harness of one attempt: checked, run to its end, and what it leaves behind. Start with `run`."""
