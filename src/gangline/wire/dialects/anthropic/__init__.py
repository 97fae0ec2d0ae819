"""Anthropic's Messages API.

`dialect` lists its routes, `request` parses a call with `content` and `tools`, and `reply`, `events` and `errors` write
the answer. Start with `dialect`.
"""
