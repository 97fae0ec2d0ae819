"""Programs that run elsewhere: `bridge` in Harbor's Python; `steward`, with `pipes` and `errors`, in a sandbox.

None of them finds Gangline installed. Start with `steward`.
"""
