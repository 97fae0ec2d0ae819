"""Evaluators that ask a model: `judge` and `reward_model`, over one HTTP client (`endpoint.py`).

They call only the engine that their configuration names. Start with `judge.py`.
"""
