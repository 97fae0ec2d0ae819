"""Polar's published merging and ours over the same recorded calls: `published`, `sessions`, `comparing`."""
