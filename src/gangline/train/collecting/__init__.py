"""From finished sessions to groups worth training on.

`collector` keeps the service busy, `groups` is what it yields, and `admission`, `buffer` and `degenerates` decide
which groups are used. `batches` puts them together for a step. Start with `batches`.
"""
