"""Generated rows with a right and a wrong answer, in the columns of each preset's dataset.

They depend only on number and seed. They need no files and no network, so they can show that a service works before any
dataset is downloaded. Start with `sample`.
"""
