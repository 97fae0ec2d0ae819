"""Gangline turns any agent program into a reinforcement-learning environment."""

__all__ = ["__version__"]

__version__ = "0.1.0"
