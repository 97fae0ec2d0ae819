"""Sessions as ATIF documents, the interchange format for agents' trajectories.

`document` has the types, and `export` creates and writes documents. Start with `export`.
"""
