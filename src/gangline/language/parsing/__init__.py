"""The meaning of a model's reply text: thinking, text, tool calls; incrementally, whoever sampled it.

`parser` reads one reply in the formats of `thinking`, `tagged_calls`, `llama_json` and `harmony`; `detect` asks a chat
template which of them a model writes; `values` types the arguments that a format writes as plain text, by what
`schemas` says that the tool allows. Start with `parser`.
"""
