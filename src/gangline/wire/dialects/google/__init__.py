"""Google's Gemini API.

`dialect` lists its routes; `request` parses a call, `contents` its messages, and `tools` its tools and tool calls.
`reply` and `errors` write the answer. Start with `dialect`.
"""
