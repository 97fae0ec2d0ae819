"""Commands for this machine: doctor, config, harness, image.

`checks` is what `doctor` looks at, and `harness_check` tries an agent program with a played model. Start with
`doctor`.
"""
