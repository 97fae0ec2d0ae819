"""Engines for tests: scripted ones, models from packages, stand-ins for vLLM and SGLang."""
