"""Tasks, made, audited and measured: `importers/`, `presets/`, `vetting/`, `datasets/`, `evals/`, `check_rows/`.

Start with `importers`.
"""
