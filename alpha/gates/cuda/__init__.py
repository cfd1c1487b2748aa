"""How the engines call, time and disturb kernels of the GPU. Floor 7."""
