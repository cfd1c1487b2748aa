"""The perf gate's pins, and one code against another: comparison and its operating characteristic. Floor 7."""
