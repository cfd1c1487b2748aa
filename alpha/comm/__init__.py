"""Ranks that work together: a world of processes, checked messages between them, and collectives over these. Floor 4."""
