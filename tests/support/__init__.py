"""Helpers that tests of several folders share, by their subject."""
