"""Agent programs (`harnesses/`), and the functions that a model may call (`tools/`).

Start with `harnesses.shell`.
"""
