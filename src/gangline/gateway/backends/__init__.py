"""The engines behind a node.

`pool` adds, removes and pauses them; `placement` gives each session one; `gate` holds calls back while weights
change. Start with `pool`.
"""
