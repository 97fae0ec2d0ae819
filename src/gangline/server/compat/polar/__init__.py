"""Polar's routes.

`routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route. `tasks` (with `sampling`),
`sessions`, `results`, `views` and `names` translate. Start with `routes`.
"""
