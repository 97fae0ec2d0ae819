"""Builders (completions -> trajectory), the audit of their traces, and rows for trainers. Pure but for the files."""
