"""What several harnesses share.

It has prompts, environment variables, configuration files, templates of command lines, and the evidence that a
program leaves of its end. Start with `environment`.
"""
