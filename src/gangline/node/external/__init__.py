"""Sessions of callers that run their agents themselves.

`sessions` opens, finalizes and aborts them; `store` keeps them over a restart. Start with `sessions`.
"""
