"""`python -m nearfar`."""

from nearfar.cli import app

app()
