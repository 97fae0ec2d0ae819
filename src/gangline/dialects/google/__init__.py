"""Google's Gemini API.

`dialect` names its routes; `request` reads a call, `contents` its messages and tool calls, and `reply` and `errors`
write the answer. Start with `dialect`.
"""
