"""An artifact on disk: opened, checked, trusted, given memory, loaded."""
