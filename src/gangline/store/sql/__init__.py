"""Tasks and sessions in SQL.

`tasks` changes them in transactions, `leasing` decides on transitions without a database, and `reader` only reads.
Start with `leasing`, then `tasks`.
"""
