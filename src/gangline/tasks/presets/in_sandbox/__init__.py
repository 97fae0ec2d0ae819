"""Programs that run in the sandbox's own Python, 3.8 or newer, and import nothing of Gangline. Start with `asserts`."""
