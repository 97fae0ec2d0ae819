"""The server's own HTTP routes.

`tasks`, `nodes`, `sessions`, `events` and `metrics` contain the handlers. Route definitions, and the checks before
handlers, are in `gangline.wire.http`. Start with `tasks`.
"""
