"""Ready-made task families: `swe`, `stem`, `math` and `code`.

A preset consists of a task template (`templates/`), a reader of its dataset's columns (`rows/`) and a generator of
sample rows with known answers (`samples/`). `Preset.task` turns a row into a task. Start with `preset`.
"""
