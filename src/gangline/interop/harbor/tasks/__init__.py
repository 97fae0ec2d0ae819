"""Tasks in Harbor's format, schema 1.4: `config` is its file, `task` makes an ordinary task of a folder.

Start with `task`."""
