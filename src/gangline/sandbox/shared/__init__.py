"""The host's part of every runtime.

It copies files in and out, watches the disk, gives each sandbox a user, and removes leftovers of a crash. Start with
`files` or `leftovers`.
"""
