"""Terminal output of commands.

`output` has the functions shared by all commands, `exits` the exit codes, and `views` the tables. Start with `output`.
"""
