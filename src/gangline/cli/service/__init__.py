"""Commands that run or control the service.

`up` runs all of it by `bring_up`; `server`, `node`, `engine` and `cluster` run its parts; the others observe and
control it. Start with `up`.
"""
