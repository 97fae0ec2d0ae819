"""Commands that train: train and demo.

`run` carries out one experiment, and `view` draws it. Start with `train`.
"""
