"""Trainers, and samples to train on."""
