"""Polar's routes.

`routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route. `tasks` and `sessions` translate
with the help of `agents`, `commands` and `sampling`; so do `results`, `views` and `names`. Start with `routes`.
"""
