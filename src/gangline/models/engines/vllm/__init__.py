"""A vLLM server as an engine.

`engine` asks, `wire` has the requests and replies as vLLM writes them, and `stream` reads its events. Start with
`engine`.
"""
