"""The harness of one attempt: checked, run to its end, and its log files collected. Start with `run`."""
