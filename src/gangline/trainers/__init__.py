"""Thin adapters to other systems. Each needs its extra, or the system that it adapts to."""
