"""Tasks that run for the sake of one that is trained on: coalitions, a greedy session.

Start with `tasks`.
"""
