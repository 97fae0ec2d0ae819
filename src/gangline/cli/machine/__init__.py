"""Commands for this machine: doctor, config, harness, image.

`checks` has the checks of `doctor`, and `harness_check` runs an agent program against a scripted model. Start with
`doctor`.
"""
