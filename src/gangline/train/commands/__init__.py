"""Commands for training: train and demo.

`run` runs one experiment, and `view` displays it. Start with `train`.
"""
