"""Results of sessions.

`files` keeps them in a folder, and `artifacts` at any fsspec URL. Start with `files`.
"""
