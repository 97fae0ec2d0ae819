"""An agent as a service of OpenAI's Responses API: each request is a session, and its answer the agent's whole run.

For programs that call an agent where they could call a model, such as NeMo Gym's `remote_agent`. `app` reads what
the agent is to do and runs the session, and `response` says what it did, with its tokens. Start with `app`.
"""
