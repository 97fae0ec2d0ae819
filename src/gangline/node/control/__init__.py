"""The routes by which a node is controlled.

`sessions` has the ones of callers, `backends` the ones of engines, and `gate` the ones of a weight update;
`gangline.wire.http` stands before all of them. Start with `sessions`.
"""
