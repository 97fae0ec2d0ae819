"""ProRL Agent's routes.

`part` joins them to the server. `routes` takes jobs, `jobs` translates them, `nodes` forwards to all nodes at once, and
`templates` reads the operator's task templates. Start with `routes`.
"""
