"""Modules that run in a Python with Inspect: the task reader, the scorer runner, and sandbox files and commands.

Start with `scoring`.
"""
