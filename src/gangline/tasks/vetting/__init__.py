"""The audit of tasks: are their rewards to be believed?

Each task is tried in sessions of the running service: its reference solution, doing nothing, scripted cheats, mutants
of the solution, other conditions of grading. `trials` are those sessions, `checks` read them, and `audit` does both for
one task. Start with `audit`.
"""
