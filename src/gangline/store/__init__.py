"""Durable data: `sql/` stores tasks and sessions, `journal/` model calls, `results/` results, `audit` control actions.

Data documented as durable is synced before the function returns. Start with `sql/leasing`, which decides where a
session goes next, or with `journal/log`.
"""
