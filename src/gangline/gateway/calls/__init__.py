"""Model calls of agents.

`proxy` takes a request, `reading` makes it a canonical call, `session` admits it, and `in_flight` samples, captures
and commits it. Start with `proxy`, then `in_flight`.
"""
