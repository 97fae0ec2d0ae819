"""The action server's own source: it runs in a sandbox, on the sandbox's Python.

Standard library and the syntax of Python 3.8 only, and no import of Gangline: the modules travel as text over the
channel (see `gangline.agents.tools.program`) and import each other as siblings. Nothing of them is written to the
sandbox's disk. One process serves one channel: it starts a shell, an interpreter and a worker for files when they are
first used. Start with `server`.
"""
