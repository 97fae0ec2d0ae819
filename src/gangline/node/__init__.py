"""A node leases sessions, runs them through INIT, READY, RUN and POSTRUN, and answers their model calls.

`node` assembles it. `sessions/` leases and runs, `calls/` answers agents, `capture/` keeps records exact,
`backends/` has the engines, `control/` and `external/` are for trainers and callers, `health/` protects the node.
It knows the rollout server only over HTTP, and the trainer not at all. Start with `node`, then `sessions/pipeline`.
"""
