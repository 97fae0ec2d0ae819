"""Evaluations: runs an agent on many tasks and reports results.

`run` sends tasks through the service and records each session, `report` computes the figures, and `statistics` contains
the estimators. Start with `run`.
"""
