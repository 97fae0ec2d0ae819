"""Model calls of agents.

`proxy` receives a request, `reading` turns it into a canonical call, `session` admits it as a `flight`, and `chat_call`
(or `token_call`, for prompts in ids) samples and commits it. Start with `proxy`, then `flight`.
"""
