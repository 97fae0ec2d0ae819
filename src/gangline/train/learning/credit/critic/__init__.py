"""A critic instead of a group's baseline: a head that predicts returns, and advantages over its predictions (GAE).

`settings` is read without PyTorch. Start with `targets`.
"""
