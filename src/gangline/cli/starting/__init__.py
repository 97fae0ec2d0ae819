"""The folder of a first agent. Start with `init.py`: `init` copies one of the folders in `templates/`."""
