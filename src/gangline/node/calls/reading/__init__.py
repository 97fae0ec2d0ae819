"""How a model call's body becomes a canonical call: here, or for a large one in a process of its own. Start with
`body`.
"""
