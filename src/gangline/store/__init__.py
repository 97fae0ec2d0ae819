"""Durable data: the journal of completions, tasks and sessions, results."""
