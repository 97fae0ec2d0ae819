"""A critic replaces the group's baseline: a head predicts returns, and advantages are computed from its predictions
(GAE).

`settings` can be read without PyTorch. Start with `targets`.
"""
