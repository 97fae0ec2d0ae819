"""Commands for tasks: submit, list, watch.

`files` and `imported` read tasks from our and other systems' files. Start with `submit`.
"""
