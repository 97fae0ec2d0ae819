"""The runtime `sandbox`: namespaces made by bubblewrap.

`runtime` starts a sandbox, or explains why this machine cannot, and `command_line` decides which files it sees. Start
with `runtime`.
"""
