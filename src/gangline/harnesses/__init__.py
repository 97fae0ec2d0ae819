"""Adapters for agent programs: each writes its program's configuration into a runtime and judges how the run ended.

The program itself is never changed. *Not here*: running the command, budgets, killing (`gateway`); sandboxes
(`runtimes`).
"""
