"""ProRL Agent's routes.

`part` adds them to the server. `routes` accepts jobs, `jobs` converts them, `nodes` forwards engine changes to all
nodes, and `templates` reads the operator's task templates. Start with `routes`.
"""
