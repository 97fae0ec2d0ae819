"""Calls of a forked session that are answered from its parent's record. Start with `replay`."""
