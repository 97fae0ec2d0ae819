"""Generated rows with a right and a wrong answer, in the columns of each preset's dataset.

They are the same for the same number and seed. They need no file from elsewhere and no network, so they show that a
service works before any dataset is fetched. Start with `sample`.
"""
