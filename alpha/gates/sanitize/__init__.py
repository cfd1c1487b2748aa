"""Kernels of the GPU under compute-sanitizer, sound and with planted errors. Floor 7."""
