"""A node's stock alongside its sessions.

`checkpoints` has the files of their turns, `warm` the sandboxes that nobody has used yet. Start with `checkpoints`.
"""
