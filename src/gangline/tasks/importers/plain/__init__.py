"""Rows of plain datasets: columns become a task's fields (`mapping`), its choices and its right answers.

Start with `dataset`.
"""
