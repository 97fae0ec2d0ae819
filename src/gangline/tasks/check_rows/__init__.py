"""Checks rows of any system, from their files alone.

`dump` reads files. `row_forms` and `call_forms` convert each system's records to `samples`. `rules` checks a single
sample, `history` compares it with earlier ones. Start with `check`.
"""
