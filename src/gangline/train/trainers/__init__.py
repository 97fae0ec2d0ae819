"""Adapters to trainers, one module or folder each. Each needs its extra, or the trainer it adapts to.

An adapter turns groups of `gangline.train.collecting` into its trainer's batches and fulfils `contract`. `callbacks`
receives results over HTTP for trainers that prefer it. Start with `contract`, then `verl`.
"""
