"""Importing, auditing and measuring tasks: `importers/`, `presets/`, `vetting/`, `datasets/`, `evals/`, `check_rows/`.

Start with `importers`.
"""
