"""Commands for this machine: doctor, config, harness, image.

`checks` has the checks of `doctor`, and `harness_check` tries an agent program with a played model. Start with
`doctor`.
"""
