"""Commands in a sandbox.

`execution` runs a command under a supervisor and bounds its output, `channel` exchanges bytes with one, `holder` keeps
the sandbox's namespaces alive, `spawner` waits inside them, `supervisor` runs one command after another, and `helpers/`
has the programs that run there, all forks of the `forkserver`. Start with `execution`, and see
`gangline.sandbox.supervised`, which uses them.
"""
