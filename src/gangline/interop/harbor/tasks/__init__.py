"""Tasks in Harbor's format, schema 1.4: `config` reads `task.toml`, `task` turns a folder into an ordinary task.

Start with `task`.
"""
