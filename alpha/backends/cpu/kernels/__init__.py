"""CPU kernels, one op family per file, planted faults beside each in <file>.faults.toml."""
