"""Executors: each runs an artifact's plans or graph on one kind of device."""
