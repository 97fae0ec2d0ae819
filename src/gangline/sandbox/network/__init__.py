"""The network of a sandbox.

`relay` brings the node's proxy into it, and `forwarding` the addresses that its task's network list allows. Start
with `listeners`.
"""
