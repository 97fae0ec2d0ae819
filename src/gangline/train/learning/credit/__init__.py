"""Whose merit a reward is: a session's traces, turns and roles, the players of a coalition, or tokens by a critic.

Start with `traces`, or with `critic`.
"""
