"""Thin adapters to other systems. Each is a package of its own, and needs the extra of its name."""
