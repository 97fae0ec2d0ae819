"""Turns completions into rows: builders of traces, their audit, and files of rows. Pure except for the files.

`builders/` makes traces with `chains` and `lineage`, `audit` and `drift` check them, `rows`, `parquet` and `export`
write them, and `atif/` writes conversations. Start with `chains`, then `builders/prefix_merging`.
"""
