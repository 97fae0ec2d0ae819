"""Code shared by several harnesses: prompts, environment variables, configuration files, command templates, and
evidence of how a program ended.

It has prompts, environment variables and placeholders, configuration files, and the evidence that a program leaves of
its end. Start with `environment`.
"""
