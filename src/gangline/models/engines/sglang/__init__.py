"""An SGLang server as an engine.

`engine` makes the calls, and `wire` has SGLang's requests and replies. Start with `engine`.
"""
