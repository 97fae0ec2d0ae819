"""Evaluator `cases`: a program against hidden inputs and outputs. Start with `evaluator.py`."""
