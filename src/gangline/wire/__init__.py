"""HTTP servers and clients, and the wire formats of model providers: `http/`, `client/`, `dialects/`.

Start with `http.routes`.
"""
