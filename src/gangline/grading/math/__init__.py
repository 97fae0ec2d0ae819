"""Evaluator `math`: an agent's answer against the right one, by mathematics rather than by letters.

`evaluator.py` finds the answer in the session, `comparing.py` compares, in a child process. Start with the first.
"""
