"""An engine's HTTP surface, with vLLM's routes and fields, over anything that samples. Start with `app`."""
