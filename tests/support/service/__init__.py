"""A whole service, its commands, and tasks for it."""
