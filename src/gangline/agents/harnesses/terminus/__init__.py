"""Harness `terminus`: Harbor's agent terminus-2 (Python package `harbor`), which types into a terminal.

Its model has no tools: it answers with JSON (or XML) that contains the keys to press. Harbor runs its agents outside of
an environment that it starts; `runner.py` instead runs the agent inside the runtime, on the machine itself. The
terminal is tmux, which the runtime must have. Start with `adapter`.
"""
