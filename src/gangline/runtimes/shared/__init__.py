"""What every runtime needs on the host.

It copies files in and out, watches the disk, gives each sandbox a user, and clears away leftovers of a crash. Start
with `files` or `leftovers`.
"""
