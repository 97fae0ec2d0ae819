"""The audit of tasks: checks whether their rewards can be trusted.

Each task is tried in sessions of the running service: its reference solution, doing nothing, scripted cheats, mutants
of the solution, other grading conditions. `trials` defines these sessions, `checks` evaluates them, and `audit` runs
both for one task. Start with `audit`.
"""
