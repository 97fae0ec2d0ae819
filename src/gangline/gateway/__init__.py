"""A node: it leases sessions, runs them through INIT, READY, RUN and POSTRUN, and answers their model calls.

It knows the rollout server only over HTTP, and the trainer not at all.
"""
