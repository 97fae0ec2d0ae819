"""Sessions that a node leases and runs.

`pipeline` leases them, `attempt` takes one through its stages, `grading` scores it, and `leases/` brings the result to
the server. Start with `pipeline`, then `attempt`.
"""
