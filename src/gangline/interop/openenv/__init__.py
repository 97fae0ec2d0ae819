"""Tasks served as OpenEnv environments: a client outside acts in a task's sandbox, and gets the task's reward.

`episode` runs one task as a session whose model is the client, `command` has the engine that answers its calls with
the client's actions, `seats` gives each client an episode of its own, and `app` speaks OpenEnv's protocol. Start with
`episode`.
"""
