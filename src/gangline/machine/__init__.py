"""What a process needs of its machine: whole files, private files, files of others, child programs, logs, traces.

Start with `durable`.
"""
