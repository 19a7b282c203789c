"""The version of nearfar, for what writes it down."""

__version__ = "0.1.0"
