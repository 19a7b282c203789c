"""Models kept on this machine by their names: built once, then run, listed, copied and removed."""
