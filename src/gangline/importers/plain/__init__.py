"""Rows of plain datasets: columns become a task's fields (`mapping`), its choices and its right answers.

`tables` reads CSV. Start with `dataset`.
"""
