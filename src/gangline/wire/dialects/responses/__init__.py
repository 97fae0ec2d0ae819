"""OpenAI's Responses API.

`dialect` lists its routes; `request` parses a call, `items` its conversation, and `reply`, `output` and `errors` write
the answer. Start with `dialect`.
"""
