"""Clients of model calls: the providers' SDKs, their request types, and calls without an SDK."""
