"""The reference executor: all ranks of a Program in one process."""
