"""OpenAI's Responses API.

`dialect` names its routes; `request` reads a call, `items` its conversation, and `reply`, `output` and `errors` write
the answer. Start with `dialect`.
"""
