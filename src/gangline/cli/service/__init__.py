"""Commands that run or control the service.

`up` runs all of it; `server`, `node`, `engine` and `cluster` its parts; the others look at it and control it. Start
with `up`.
"""
