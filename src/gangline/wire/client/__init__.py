"""Clients of the rollout server and of nodes, and discovery of a service on this machine.

Start with `server` (asynchronous) or `sync`; both use HTTP through `base`. `running` reads the files that
`gangline up` and `gangline server` leave for other commands. The clients can also be imported from `gangline` itself.
"""
