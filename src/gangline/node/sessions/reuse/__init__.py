"""Sandbox state that a node keeps for reuse.

`checkpoints` has files from sessions' turns, `warm` has unused sandboxes. Start with `checkpoints`.
"""
