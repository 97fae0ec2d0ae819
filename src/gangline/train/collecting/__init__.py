"""Turns finished sessions into groups worth training on.

`collector` keeps the service busy and yields groups (`groups`). `admission`, `buffer` and `degenerates` decide which
groups are used. `batches` assembles the groups of a step. Start with `batches`.
"""
