"""Engines that are called with token ids only.

`engine` runs a call. `routes`, `template` and `renderers` are three ways to render its prompt and parse its reply, over
the requests in `calls` and `wire`. Start with `engine`.
"""
