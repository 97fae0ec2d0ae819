"""The runtime `apptainer`: images run by Apptainer.

`runtime` starts a sandbox, and `command_line` decides what it sees. Start with `runtime`.
"""
