"""Builders (completions -> trajectory), the audit of what they made, and rows for trainers. Pure but for the files."""
