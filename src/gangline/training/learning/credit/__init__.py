"""Whose merit a reward is: a session's traces, turns and roles, or the players of a coalition. Start with `traces`."""
