"""Adapters to trainers, one module or folder for each. Each needs its extra, or the system that it adapts to.

An adapter turns groups of `gangline.train.collecting` into its trainer's batches and keeps the promises of
`contract`; `callbacks` receives results over HTTP for trainers that prefer it. Start with `contract`, then `verl`.
"""
