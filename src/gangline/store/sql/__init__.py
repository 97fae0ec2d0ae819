"""Tasks and sessions in SQL.

`tasks` changes them in transactions, `leasing` decides without a database what may follow, and `reader` looks
without writing. Start with `leasing`, then `tasks`.
"""
