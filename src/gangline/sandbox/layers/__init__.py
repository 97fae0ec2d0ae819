"""Checkpoints of a sandbox's writable folders.

`stack` has the layers of one sandbox, `records` the checkpoints on disk, `copying` and `mounting` the two ways to make
files of layers, and `contents` and `folders` what both need. Start with `stack`.
"""
