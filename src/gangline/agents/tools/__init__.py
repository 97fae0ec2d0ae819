"""Tools of an agent that runs in the node, and the action server through which they act in a sandbox.

`contract` has the Protocol of a tool, `builtin/` the tools, and `calls` calls one. An **action server** runs in the
sandbox, behind a channel of its runtime; `in_sandbox/` is its source, and `ActionServer` the node's side. The server
runs as the agent's user, so its answers are untrusted: they are bounded, validated and timed, and the node never acts
on them. Start with `contract`.
"""
