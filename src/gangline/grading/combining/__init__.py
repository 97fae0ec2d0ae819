"""Evaluators that combine other evaluators: `composite`, `staged`, `shaped` and `per_turn`.

Each contains others by name and configuration (`nested.py`), which are validated when a task is submitted. Start with
`composite.py`.
"""
