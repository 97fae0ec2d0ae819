"""Adapters for agent programs: each writes its program's configuration into a runtime and judges how the run ended.

The program itself is never changed. `shared/` has what several adapters need, and `installation` the programs'
versions. *Not here*: running the command, budgets, killing (`gateway`); sandboxes (`runtimes`). Start with `shell`,
then `codex`.
"""
