"""The embedded engine: a small language model on this machine, one decode thread, exact log-probs.

`server` starts it, `sampler` owns the decode thread and its `batch`, and `model` runs the forward pass. `scoring`
recomputes log-probs for the audit. Start with `sampler`.
"""
