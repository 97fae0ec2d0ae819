"""Model calls of agents.

`proxy` takes a request, `reading` makes it a canonical call, `session` admits it as a `flight`, and `in_flight` samples
and commits it. Start with `proxy`, then `in_flight`.
"""
