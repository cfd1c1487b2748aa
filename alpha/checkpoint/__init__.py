"""Checkpoints: state on disk, whole or not at all. `simple` is the format, `disk` the file operations it is made of."""
