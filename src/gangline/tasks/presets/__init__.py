"""Task families that are ready to use: `swe`, `stem`, `math` and `code`.

A preset is a task template (`templates/`), a reader of its dataset's columns (`rows/`) and a generator of sample rows
with known answers (`samples/`). A row becomes a task by its fields: `Preset.task`. Start with `preset`.
"""
