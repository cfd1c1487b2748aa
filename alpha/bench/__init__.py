"""`alpha bench`: ours, the ceiling and each installed peer, measured in one run."""
