"""The server's own HTTP routes.

`tasks`, `nodes`, `sessions`, `events` and `metrics` have the handlers; the definition of a route, and the checks before
it, are in `gangline.wire.http`. Start with `tasks`.
"""
