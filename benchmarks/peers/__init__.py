"""Converters and runners with which other projects run the same model shapes."""
