"""Programs that run elsewhere: `bridge` in Harbor's Python; `daemon`, with `pipes` and `errors`, in a sandbox.

Gangline is not installed there. Start with `daemon`.
"""
