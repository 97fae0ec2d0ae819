"""The source of the action server, which runs in a sandbox, on the sandbox's Python.

It uses only the standard library and the syntax of Python 3.8, and never imports Gangline: the modules are sent as text
over the channel (see `gangline.agents.tools.program`) and import each other as siblings. They are not written to the
sandbox's disk. One process serves one channel: it starts a shell, an interpreter and a worker for files on first use.
Start with `server`.
"""
