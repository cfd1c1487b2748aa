"""Readers of runs: `runs.load` checks, `views` shows as plain data, `alpha-report` writes pages. Floor 7. Needs the extra `report`."""
