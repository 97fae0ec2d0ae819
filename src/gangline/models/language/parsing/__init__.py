"""Parses a model's reply text incrementally into thinking, text and tool calls, for any engine.

`parser` parses one reply in the formats of `thinking`, `tagged_calls`, `harmony` and `families`. The tags of `families`
are data: `sections` finds them, and `json_calls`, `pair_calls` and `literal_calls` parse the text between them.
`detect` determines a model's formats from its chat template. `values` converts plain-text arguments to JSON, using the
tool's schema through `schemas`. Start with `parser`.
"""
