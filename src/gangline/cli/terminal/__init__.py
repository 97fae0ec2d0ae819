"""How commands print.

`output` has what every command shares, `exits` the exit codes, and `views` the tables. Start with `output`.
"""
