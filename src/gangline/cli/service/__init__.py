"""Commands that run or control the service.

`up` runs the whole service through `bring_up`; `server`, `node`, `engine` and `cluster` run its parts. The others
observe and control it. Start with `up`.
"""
