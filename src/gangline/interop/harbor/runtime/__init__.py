"""The runtime `harbor`: any environment class of Harbor's, asked through a bridge in Harbor's own Python.

`runtime` starts a sandbox, `bridge` talks to Harbor, `link` to the steward in the sandbox, and `streams` carries bytes
between the two. `inside/` has the programs at the other ends. Start with `runtime`.
"""
