"""Serves an agent through OpenAI's Responses API: each request runs a session, and the response is the whole run.

For programs that call an agent in place of a model, such as NeMo Gym's `remote_agent`. `app` parses requests and runs
sessions, `response` builds responses with token ids. Start with `app`.
"""
