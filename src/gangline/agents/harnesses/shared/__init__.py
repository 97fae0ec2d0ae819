"""What several harnesses share.

It has prompts, environment variables and placeholders, configuration files, and the evidence that a program leaves of
its end. Start with `environment`.
"""
