"""Checkpoints: state on disk, whole or not at all. `folders` is the format, `ranges` its files, `disk` its file operations."""
