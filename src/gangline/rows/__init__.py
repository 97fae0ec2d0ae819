"""From completions to rows: builders of traces, the audit of them, and files of rows. Pure but for the files.

`builders/` makes traces with the help of `chains` and `lineage`, `audit` and `drift` judge them, `rows`, `parquet` and
`export` write them, and `atif/` writes conversations. Start with `chains`, then `builders/prefix_merging`.
"""
