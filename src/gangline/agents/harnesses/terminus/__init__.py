"""Harness `terminus`: Harbor's agent terminus-2 (Python package `harbor`), which types into a terminal.

Its model has no tools: it answers with JSON (or XML) that says which keys to press. Harbor runs its agents from outside
on an environment that it starts; `runner.py` runs the agent inside the runtime instead, on the machine where it stands.
The terminal is tmux, which the runtime must have. Start with `adapter`.
"""
