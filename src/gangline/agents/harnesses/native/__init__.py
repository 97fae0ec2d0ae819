"""Harness `native`: an agent that runs in the node and acts on the runtime from outside.

Its model calls are made as by any harness: over HTTP, to the session's URL on the node's proxy, with the session's key,
in a public wire format (OpenAI Chat). They are therefore captured, budgeted and fenced in the same way. Its code and
its key never enter the runtime, and the sandbox needs no network.

`model` calls the model, `toolbox` has the session's tools, `loop` alternates between them, and `adapter` runs the loop
in a session. Start with `loop`.
"""
