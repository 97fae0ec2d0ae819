"""A node's journal of model calls.

`log` appends and replays, `entries` are its records, and `frames` the format of its files. Start with `log`.
"""
