"""Nodes and their parts: attempts, backends, proxies, runtimes, users."""
