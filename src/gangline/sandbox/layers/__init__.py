"""Checkpoints of a sandbox's writable folders.

`stack` has the layers of one sandbox, `records` the checkpoints on disk, and `copying` and `mounting` the two ways to
turn layers into files. Start with `stack`.
"""
