"""Faults: kills, simulated servers, agents and trainers that go through them."""
