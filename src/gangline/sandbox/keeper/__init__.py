"""Sandboxes that outlive a node's process.

`keeper` is the process that owns them, `kept` the node's side, and `link` and `wire` the connection between them. Start
with `kept`.
"""
