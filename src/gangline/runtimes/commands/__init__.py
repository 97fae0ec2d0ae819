"""Commands in a sandbox.

`execution` starts one under a supervisor and bounds its output, `channel` talks with one, `holder` keeps the sandbox's
namespaces alive, `foreman` waits inside them, and `helpers/` has the programs that run there, all forks of the
`zygote`. `sandbox` is the handle over them. Start with `sandbox`, then `execution`.
"""
