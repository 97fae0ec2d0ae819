"""Tools that act in a sandbox and keep their state over an agent's turns: shell, Python, files.

An **action server** runs in the sandbox, behind a channel of its runtime; `inside/` is its source. `ActionServer` is
the node's side of it. The server runs as the agent's user, so all that it says is untrusted: answers are bounded,
checked and timed, and the node acts on none of them. Start with `action_server`.
"""
