"""Evaluators made of evaluators: `composite`, `staged`, `shaped` and `per_turn`.

Each holds others by name and configuration (`nested.py`), which are checked when a task is submitted. Start with
`composite.py`.
"""
