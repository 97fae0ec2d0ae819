"""Polar's routes.

`part` adds them to the server. `routes` accepts tasks; `nodes` and `dispatch` serve gateways that join by Polar's
route. `tasks` and `sessions` translate, using `agents`, `commands` and `runtimes`; `records`, `results` and `views`
convert results. Start with `routes`.
"""
