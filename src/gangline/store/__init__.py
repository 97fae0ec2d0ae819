"""Durable data: `sql/` has tasks and sessions, `journal/` model calls, `results/` results, `audit` control actions.

What is documented as durable was synced before its function returned. Start with `sql/leasing`, which decides where a
session goes next, or with `journal/log`.
"""
