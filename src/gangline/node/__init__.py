"""A node: it leases sessions, runs them through INIT, READY, RUN and POSTRUN, and answers their model calls.

`node` puts it together. `sessions/` leases and runs, `calls/` answers agents, `truth/` keeps records exact,
`backends/` has the engines, `control/` and `external/` are for trainers and callers, `health/` keeps the node sound.
It knows the rollout server only over HTTP, and the trainer not at all. Start with `node`, then `sessions/pipeline`.
"""
