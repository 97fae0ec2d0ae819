"""Engine servers of our own: the OpenAI routes with vLLM's token fields, over anything that samples tokens.

`app` has the routes; `chat`, `completions` and `generate` answer them, and `sampler` is the interface to the sampling.
`embedded/` is a small model on this machine, `scripted/` replies from a script. Start with `sampler`, then `app`.
"""
