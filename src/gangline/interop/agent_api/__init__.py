"""An agent as a service of OpenAI's Responses API: each request is a session, and its answer the agent's whole run.

For programs that call an agent where they could call a model, such as NeMo Gym's `remote_agent`. `request` reads what
the agent is to do, `response` tells what it did, with its tokens, and `app` runs the sessions between them. Start with
`app`.
"""
