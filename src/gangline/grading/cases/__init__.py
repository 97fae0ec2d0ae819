"""Evaluator `cases`: tests a program with hidden inputs and outputs. Start with `evaluator.py`."""
