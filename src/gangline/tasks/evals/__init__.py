"""Evaluations: many tasks through an agent, and what that says about it.

`run` takes tasks through the service and keeps a record of each session, `report` makes the figures of them, and
`statistics` has the estimators. Start with `run`.
"""
