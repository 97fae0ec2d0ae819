"""Adapters for agent programs: each writes its program's configuration to a runtime and judges how the run ended.

The program itself is never modified. `shared/` has code for several adapters, and `installation` the programs'
versions. *Not here*: running the command, budgets, killing (`node`); sandboxes (`sandbox`). Start with `shell`,
then `codex`.
"""
