"""A node's journal of model calls.

`log` appends and replays, `entries` has its records and the frames around them. Start with `log`.
"""
