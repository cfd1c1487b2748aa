"""Live profiling in a browser: `alpha dashboard`. Reads run directories, writes nothing. Floor 8."""
