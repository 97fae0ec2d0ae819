"""Sessions as ATIF documents, the interchange format of agents' trajectories.

`document` has the types, and `export` makes and writes documents. Start with
`export`.
"""
