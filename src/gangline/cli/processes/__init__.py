"""Processes of the service.

`serving` runs one in the foreground, `child` starts one, and `supervisor` keeps several running. Start with
`supervisor`.
"""
