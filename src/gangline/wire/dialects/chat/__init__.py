"""OpenAI's Chat Completions API.

`dialect` lists its routes, `request` parses a call with `tools`, and `reply` writes the answer, whole or streamed.
Start with `dialect`.
"""
