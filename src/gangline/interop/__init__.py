"""Integrations, one folder per partner: sandboxes, tasks, rewards and routes.

A folder here never imports another wing. Start with `harbor`.
"""
