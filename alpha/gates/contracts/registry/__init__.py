"""What the registry's own components promise, case by case; planted faults of the registry must be rejected by these."""
