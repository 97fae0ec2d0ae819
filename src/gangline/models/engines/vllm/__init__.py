"""A vLLM server as an engine.

`engine` makes the calls, `wire` has vLLM's requests and replies, and `stream` reads its events. Start with `engine`.
"""
