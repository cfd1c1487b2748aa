"""Device code compiled, and held against what is committed: cubins, resources, opcodes. Floor 7; needs no GPU."""
