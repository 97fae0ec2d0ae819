"""Anthropic's Messages API.

`dialect` names its routes; `request` reads a call with the help of `content` and `tools`, and `reply`, `events` and
`errors` write the answer. Start with `dialect`.
"""
