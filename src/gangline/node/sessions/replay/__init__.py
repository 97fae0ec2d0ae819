"""Recorded sessions: the files that are kept of them, and their grading once more. Start with `regrading`."""
