"""The commands of this wing.

Start with `task_files`.
"""
