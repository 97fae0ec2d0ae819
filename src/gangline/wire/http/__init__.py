"""The HTTP layer shared by the server and a node's own routes, so that both behave alike.

`routes` has a route's record and the door in front of it (own names, control token, body type, log of control actions);
around it are `problems` (errors as RFC 9457). `query` reads query strings, `negotiation` bodies and
answers, `openapi` describes routes. Start with `routes.Door`. Model calls do not pass through here.
"""
