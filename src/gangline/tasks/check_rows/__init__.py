"""Rows of any system, checked from their files alone.

`dump` reads files. `row_forms` and `call_forms` bring each system's records into one shape, `samples`. `rules` judges
a sample alone, `history` judges it after those before it. Start with `check`.
"""
