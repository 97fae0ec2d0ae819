"""Answers the model calls of Harbor's agents, and makes their rollouts sessions of a task.

`harbor serve` runs the agents and relays their calls through one WebSocket, which we open. `protocol` has its messages,
`connection` keeps it open, `calls` answers a call, `rollouts` remembers what must survive a restart, `api` reads
Harbor's own records, `groups` and `results` join them, and `delivery` hands them to the server. Start with `connector`.
"""
