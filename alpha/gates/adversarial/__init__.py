"""The gates are gated: planted faults, mutants and cheats that a gate must reject. Floor 7."""
