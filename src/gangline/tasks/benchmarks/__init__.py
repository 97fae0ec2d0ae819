"""Benchmarks by name: `catalogue.toml` says where each comes from and how its tasks are read.

Start with `catalogue`; `bringing` finds or fetches the files, `reading` makes tasks of them.
"""
