"""Reading of text that an agent wrote, in linear time or in child processes with limits. Start with `isolated.py`."""
