"""Assigns credit for a reward: to a session's traces, turns and roles, to the players of a coalition, or to tokens by a
critic.

Start with `traces`, or with `critic`.
"""
