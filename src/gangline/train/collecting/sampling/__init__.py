"""Chooses the next task from the history of the tasks: by measured difficulty, or in stages by a label.

`settings` is the experiment's `data.sampler`; `history` records draws and measurements in the run's folder. Start with
`sampler`.
"""
