"""Engine servers of our own: the OpenAI routes with vLLM's token fields, over any token sampler.

`app` defines the routes; `chat`, `completions` and `generate` answer them, and `sampler` is the interface for sampling.
`embedded/` runs a small model on this machine, and `scripted/` replies from a script. Start with `sampler`, then `app`.
"""
