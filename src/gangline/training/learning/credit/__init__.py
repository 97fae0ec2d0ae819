"""Whose merit a reward is: a session's traces, turns and roles, the players of a coalition, or with a critic its tokens.

Start with `traces`, or with `critic`.
"""
