"""The server's own HTTP routes.

`tasks`, `nodes`, `sessions`, `events` and `metrics` have the handlers; what a route is, and what stands before it, is
in `gangline.http`. Start with `tasks`.
"""
