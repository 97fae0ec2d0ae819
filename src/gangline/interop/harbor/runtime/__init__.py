"""The runtime `harbor`: uses any of Harbor's environment classes, through a bridge process in Harbor's own Python.

`runtime` starts sandboxes, `bridge` talks to Harbor, `link` to the daemon process in the sandbox, and `streams`
carries bytes between the two. `in_sandbox/` contains the programs at the other ends. Start with `runtime`.
"""
