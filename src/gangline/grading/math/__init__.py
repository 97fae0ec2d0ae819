"""Evaluator `math`: compares an agent's answer with the right one mathematically instead of as text.

`evaluator.py` finds the answer in the session, and `comparing.py` compares it in a child process. Start with the first.
"""
