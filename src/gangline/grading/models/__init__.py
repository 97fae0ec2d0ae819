"""Evaluators that call a model: `judge` and `reward_model`, over one HTTP client (`endpoint.py`).

They call only the engine named in their configuration. Start with `judge.py`.
"""
