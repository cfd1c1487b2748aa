"""Cases of `train.loop`: which text a step sees, what a resume continues, what validation counts. Floor 7."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.train import ahead, going_on, refused, steps

CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]] = {
    "train.loop": {
        "parity": [
            ("text of a step", steps.text_of_a_step),
            ("by hand", steps.by_hand),
            ("validation", steps.validation), ("foretold", steps.foretold), ("from devices", steps.from_devices),
            ("resumed", going_on.resumed), ("lasts longer", going_on.lasts_longer), ("taken back", going_on.taken_back),
            ("left over", going_on.left_over),
            ("ahead", ahead.ahead), ("beside", ahead.beside),
            ("stalls", of_settings.stalls), ("late copies", of_settings.late_copies),
        ],
        "determinism": [("same bits", steps.same_bits), ("sampled", steps.sampled)],
        "faults": [("bad step", refused.bad_step), ("bad step ahead", ahead.bad_step_ahead),
                   ("changed meanwhile", refused.changed_meanwhile), ("full disk", refused.full_disk),
                   ("not this run", going_on.not_this_run), ("sealed", going_on.sealed), ("run directory", going_on.run_directory),
                   ("from any folder", going_on.from_any_folder)],
    }
}
