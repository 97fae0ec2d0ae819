"""Programs that trials run in a sandbox, with its own Python (3.9 or newer). Start with `mutate`."""
