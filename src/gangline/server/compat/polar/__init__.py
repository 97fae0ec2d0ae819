"""Polar's routes.

`routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route, and `tasks` translates. Start
with `routes`.
"""
