"""Polar's routes.

`routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route. `tasks`, `sessions`, `results`
and `views` translate. Start with `routes`.
"""
