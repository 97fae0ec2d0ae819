"""Recorded sessions as parents of forks: their calls, and whether they can be forked. Start with `calls`."""
