"""Adapters to trainers: verl, slime, NeMo RL and TRL. Each needs its extra, or the system that it adapts to.

An adapter turns groups of `gangline.training.collecting` into its trainer's batches and keeps the promises of
`contract`; `callbacks` receives results over HTTP for trainers that prefer it. Start with `contract`, then `verl`.
"""
