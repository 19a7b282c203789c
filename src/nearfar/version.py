"""The version of nearfar."""

__version__ = "0.1.0"
