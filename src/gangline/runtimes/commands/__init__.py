"""Commands in a sandbox.

`execution` starts one under a supervisor and bounds its output, `holder` keeps the sandbox's namespaces alive, and
`helpers/` has the programs that do so from the inside. `sandbox` is the handle over both. Start with
`sandbox`, then `execution`.
"""
