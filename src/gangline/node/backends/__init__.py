"""The engines behind a node.

`pool` adds, removes and pauses them, through `clients`; `health` checks them; `placement` gives each session one;
`gate` holds calls back while weights change. Start with `pool`.
"""
