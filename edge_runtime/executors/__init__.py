"""Executors: what runs an artifact's plans on a device."""
