"""Polar's routes.

`part` joins them to the server. `routes` takes tasks, `nodes` and `dispatch` serve gateways that join by Polar's route.
`tasks` and `sessions` translate with the help of `agents`, `commands` and `runtimes`; `records`, `results` and `views`
write results. Start with `routes`.
"""
