"""Agent programs (`harnesses/`), and the functions that a model can call (`tools/`).

Start with `harnesses.shell`.
"""
