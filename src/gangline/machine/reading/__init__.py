"""Files that other people made, opened and parsed within bounds.

Start with `paths`."""
