"""The runtime `sandbox`: namespaces made by bubblewrap.

`runtime` starts a sandbox, `command_line` decides which files it sees, and `obstacles` explains why a machine cannot
run it. Start with `runtime`.
"""
