"""The creator daemon."""
