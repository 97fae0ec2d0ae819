"""Recorded sessions as the beginnings of others: their calls, and whether they can be forked. Start with `calls`."""
