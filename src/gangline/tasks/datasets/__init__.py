"""Datasets from recorded sessions: selected, deduplicated, split, and written as a folder for `datasets`.

`build` creates the folder in two passes: a survey of all sessions into an index on disk, then the rows of the selected
ones. So memory does not grow with the number of sessions. Start with `build`.
"""
