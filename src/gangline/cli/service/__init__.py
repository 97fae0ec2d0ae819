"""Commands that run or control the service.

`up` runs all of it; `server`, `node`, `engine` and `cluster` its parts; the others observe and control it. Start with
`up`.
"""
