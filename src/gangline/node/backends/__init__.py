"""The engines behind a node.

`pool` adds, removes and pauses them, through `clients`, and gives each session one; `health` checks them;
`gate` holds calls back while weights change. Start with `pool`.
"""
