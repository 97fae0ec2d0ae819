"""The runtime `apptainer`: images run by Apptainer.

`runtime` starts a sandbox, and `command_line` decides which files it sees. Start with `runtime`.
"""
