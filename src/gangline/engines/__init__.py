"""How each inference engine is asked for tokens and what it answers.

`vllm` is the client side that a node uses. `serving` is the server side that the engines of our own share:
the OpenAI routes with vLLM's token fields, over anything that samples tokens (`serving.sampler`).
"""
