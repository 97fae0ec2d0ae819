"""Programs that trials run in a sandbox, by its own Python (3.9 or newer). Start with `mutate`."""
