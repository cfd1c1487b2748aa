"""A run that lasts longer, or shorter, than it was meant to: allowed where the steps that it took would have been the same. Floor 6.

Of what decides a bit, `train.steps` enters the learning rates alone, and those where a schedule looks ahead: a cosine falls over the whole
run, wsd at its end. So a run may go on with another number of steps from a checkpoint up to which both tables of rates agree, bit for bit.
What comes of it has the bits of a run that was meant to last so long from the beginning.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alpha.config import Config
from alpha.errors import InputError
from alpha.optim.schedules import rates
from alpha.train.assemble import schedule_of


def lasting(cfg: Config, steps: int) -> Config:
    """The same run with another number of steps."""
    return cfg if cfg.train.steps == steps else replace(cfg, train=replace(cfg.train, steps=steps))


def require_same_rates(before: Config, after: Config, step: int) -> None:
    """InputError unless the first `step` updates have the same learning rates in both: it names the last step to go on from."""
    one, other = (rates(schedule_of(cfg)).array()[:step] for cfg in (before, after))
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    first = int(differ[0]) if len(differ) else both
    if first < step:
        raise InputError(
            f"the schedule {after.optim.schedule} does not allow a run of {before.train.steps} steps to last {after.train.steps}",
            came=f"a checkpoint of step {step}; from step {first} on the learning rates are others",
            expected=f"one of step {first} or before",
            do="resume from such a one with --at STEP; where there is none, start a new run",
        )
