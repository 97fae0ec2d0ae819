"""Recorded sessions: the files kept of them, and regrading. Start with `regrading`."""
