"""Readers of datasets' columns: a row -> the fields of its preset's template.

`math`, `stem` and `code` also take rows as verl has them, `prompt` and `reward_model` (`verl`). A row that is well
formed and has nothing to grade by is `RowUnsuitable` (`unsuitable`). Start with `math`.
"""
