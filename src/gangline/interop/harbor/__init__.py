"""Harbor: its environments as sandboxes (`runtime/`), and its task folders as tasks (`tasks/`).

Start with `tasks`.
"""
