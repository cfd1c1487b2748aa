"""How the engines call kernels of the CPU. Floor 7."""
