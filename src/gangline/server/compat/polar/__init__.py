"""Polar's routes.

`routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route, `tasks` and `results` translate,
and `views` describes nodes. Start with `routes`.
"""
