"""Keeps records exact.

Places a call in its session, stitches the ids that follow a sampled turn, explains a divergence, and keeps the records
in order. Start with `placing`, then `stitch`; `recorder` commits an answered call.
"""
