"""Public fakes: what stands in for a model, an engine or a client in tests. Product code never imports it.

`scripted_engine` is an engine server whose replies come from a file; `tiny_tokenizer` a tokenizer that needs none.
"""
