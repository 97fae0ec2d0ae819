"""Opens and parses untrusted files within limits.

Start with `paths`.
"""
