"""The engines behind a node.

`pool` adds, removes and pauses engines, using `clients`, and assigns one to each session. `health` checks them. `gate`
holds calls back while weights change. Start with `pool`.
"""
