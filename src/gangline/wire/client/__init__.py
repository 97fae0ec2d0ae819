"""Clients of the rollout server and of a node, and the way to find a service on this machine.

Start with `server` (asynchronous) or `sync`; both speak HTTP through `base`. `running` knows the files by which
`gangline up` and `gangline server` are found. The clients are also names of `gangline` itself.
"""
