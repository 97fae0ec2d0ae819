"""Tasks and sessions in SQL.

`tasks` changes them in transactions, `standing` decides without a database what may follow, and `reader` looks
without writing. Start with `standing`, then `tasks`.
"""
