"""Configuration: typed values out of files, flags and defaults."""
