"""Google's Gemini API.

`dialect` names its routes; `request` reads a call, `contents` its messages, and `tools` its tools and tool calls.
`reply` and `errors` write the answer. Start with `dialect`.
"""
