"""Sandboxes that outlive a node's process.

`keeper` is the process that owns them, `kept` the node's side of it, and `link` and `wire` the connection between the
two. Start with `kept`.
"""
