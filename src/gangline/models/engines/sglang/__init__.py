"""An SGLang server as an engine.

`engine` asks, and `wire` has the requests and replies as SGLang writes them. Start with `engine`.
"""
