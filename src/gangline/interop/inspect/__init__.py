"""Integration with Inspect (`inspect_ai`): our sandboxes as its sandbox environment, and its scorers for our sessions.

Inspect itself loads `sandbox`, by entry point, if both packages are installed together. `tasks` converts Inspect tasks
and builds commands for a Python that has Inspect; `in_sandbox/` has the modules for that Python, which do not import
Gangline. Nothing else here imports Inspect. Start with `sandbox`.
"""
