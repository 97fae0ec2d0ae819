"""Which task comes next, by what is known of the tasks: measured difficulty, or stages by a label.

`settings` is the experiment's `data.sampler`, `history` what was drawn and measured, kept in the run's folder. Start
with `sampler`.
"""
