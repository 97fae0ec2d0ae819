"""Serves tasks as OpenEnv environments: an external client acts in a task's sandbox and gets the task's reward.

`episode` runs one task as a session whose model is the client, `command` contains the engine that answers its calls
with the client's actions, `seats` assigns episodes to clients, and `app` implements OpenEnv's protocol. Start with
`episode`.
"""
