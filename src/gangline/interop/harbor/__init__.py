"""Harbor: its environments as sandboxes (`runtime/`), its task folders as tasks (`tasks/`), and the agents that its
server runs as sessions (`relay/`, `command`, `part`).

Start with `tasks`.
"""
