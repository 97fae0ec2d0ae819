"""Commands for tasks: submit, list, watch.

`files` and `imported` read tasks from files of ours and of others. Start with `submit`.
"""
