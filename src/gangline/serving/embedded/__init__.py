"""The embedded engine: a small language model on this machine, one decode thread, exact log-probs."""
