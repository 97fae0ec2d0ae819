"""The runtime `sandbox`: namespaces made by bubblewrap.

`runtime` starts a sandbox, `command_line` decides what it sees, and `obstacles` explains a machine that cannot do it.
Start with `runtime`.
"""
