"""Databases, and disks that lose power."""
