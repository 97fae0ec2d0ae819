"""The routes that control a node.

`sessions` has the callers' routes, `backends` those for engines, and `gate` those for a weight update.
`gangline.wire.http` handles every request first. Start with `sessions`.
"""
