"""Datasets from recorded sessions: selected, deduplicated, split, and written as a folder that `datasets` loads.

`build` makes the folder in two passes: a survey of all sessions into an index on the disk, then the rows of the chosen
ones. So memory does not grow with the number of sessions. Start with `build`.
"""
