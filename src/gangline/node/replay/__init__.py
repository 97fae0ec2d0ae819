"""Answers calls of a forked session from its parent's record. Start with `replay`."""
