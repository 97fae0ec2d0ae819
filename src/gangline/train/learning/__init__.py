"""From groups to a gradient step.

`samples` turns groups into rows with advantages, `packing` into batches, and `loss` and `learner` train; `algorithms`
names the choices. Start with `algorithms`, then `learner`.
"""
