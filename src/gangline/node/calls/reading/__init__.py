"""How a model call's body becomes a canonical call: here, or for a large one in its own process. Start with
`body`.
"""
