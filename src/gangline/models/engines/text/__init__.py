"""Engines that speak text only.

`engine` is any OpenAI-compatible server, whose tokens stay unknown. `parsed` parses thinking and tool calls from the
text of an engine that does not. Start with `engine`.
"""
