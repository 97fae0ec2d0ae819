"""Evaluations for tests."""
