"""Nodes on the machines of a Ray cluster (extra `cluster`)."""
