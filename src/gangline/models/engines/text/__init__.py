"""Engines that speak text only.

`engine` is any OpenAI-compatible server, whose tokens stay unknown; `parsed` reads thoughts and tool calls out of the
text of an engine that does not. Start with `engine`.
"""
