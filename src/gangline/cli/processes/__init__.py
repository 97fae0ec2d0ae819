"""Processes of the service.

`serving` runs one in the foreground, `child` starts one, and `supervisor` keeps several. Start with `supervisor`.
"""
