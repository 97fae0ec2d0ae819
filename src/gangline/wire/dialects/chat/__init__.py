"""OpenAI's Chat Completions API.

`dialect` names its routes; `request` reads a call with the help of `tools`, and `reply` writes the
answer, whole or streamed. Start with `dialect`.
"""
