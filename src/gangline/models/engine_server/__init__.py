"""The HTTP server of an engine, with vLLM's routes and fields, over any sampler. Start with `app`."""
