"""Readers of dataset columns: a row -> the fields of its preset's template.

`math`, `stem` and `code` also accept verl's rows, with `prompt` and `reward_model` (`verl`). A well-formed row without
anything to grade by is `RowUnsuitable` (`unsuitable`). Start with `math`.
"""
