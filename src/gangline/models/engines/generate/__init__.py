"""Engines asked in token ids alone.

`engine` runs a call; `routes`, `template` and `renderers` are three ways to render its prompt and read its reply,
over the requests in `calls` and `wire`. Start with `engine`.
"""
