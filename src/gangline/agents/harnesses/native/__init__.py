"""Harness `native`: an agent that runs in the node and acts in the runtime from outside.

Its model calls take the way of every harness: over HTTP, to the session's URL on the node's proxy, with the session's
key, in a public wire format (OpenAI Chat). So they are captured, budgeted and fenced like those of any harness. Its
code and its key never enter the runtime: the sandbox needs no network.

`model` asks, `toolbox` has the session's tools, `loop` goes from one to the other, and `adapter` turns them into a run.
Start with `loop`.
"""
