"""The meaning of a model's reply text: thinking, text, tool calls; incrementally, whoever sampled it.

`parser` reads one reply in the formats of `thinking`, `tagged_calls`, `harmony` and `families`. The tags
of the last are data: `sections` finds them, and `json_calls`, `pair_calls` and `literal_calls` read between them.
`detect` asks a chat template which of them a model writes; `values` types the arguments that a format writes as plain
text, by what `schemas` says that the tool allows. Start with `parser`.
"""
