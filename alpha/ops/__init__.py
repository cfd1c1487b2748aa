"""The op table: one file per op, one row (`OpSpec`) per op; found by looking at this folder, listed nowhere else."""
