"""Cases of `train.loop`: which text a step sees, what a resume continues, what validation counts. Floor 7."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts import of_settings
from alpha.gates.contracts.train import (
    ahead,
    barred,
    clusters,
    going_on,
    hubs,
    launches,
    looks,
    origins,
    reading,
    refused,
    room,
    run_dirs,
    saying,
    session_ranks,
    sessions,
    spent,
    steps,
    validated,
    wiring,
)

CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]] = {
    "train.loop": {
        "parity": [
            ("text of a step", steps.text_of_a_step),
            ("by hand", steps.by_hand),
            ("validation", steps.validation), ("foretold", steps.foretold), ("from devices", steps.from_devices),
            ("resumed", going_on.resumed), ("lasts longer", going_on.lasts_longer), ("taken back", going_on.taken_back),
            ("left over", going_on.left_over), ("killed", going_on.killed),
            ("killed beside", going_on.killed_beside),
            ("ahead", ahead.ahead), ("beside", ahead.beside),
            ("stalls", of_settings.stalls), ("late copies", of_settings.late_copies),
            ("wired", wiring.programs), ("parts of a run", wiring.parts_of_a_run),
            ("read", reading.sides), ("orders", reading.orders),
            ("session", sessions.whole), ("session went on", sessions.went_on),
            ("session of ranks", session_ranks.ranks), ("session begun", session_ranks.begun), ("session mixed up", session_ranks.mixed_up),
            ("session clocks", session_ranks.clocks),
            ("MFU of many", saying.mfu_of_many),
        ],
        "determinism": [("same bits", steps.same_bits), ("sampled", steps.sampled)],
        "faults": [("bad step", refused.bad_step), ("bad step ahead", ahead.bad_step_ahead),
                   ("changed meanwhile", refused.changed_meanwhile), ("full disk", refused.full_disk),
                   ("not this run", going_on.not_this_run), ("sealed", going_on.sealed), ("run directory", going_on.run_directory),
                   ("from any folder", going_on.from_any_folder),
                   ("calls and FLOPs", wiring.calls_and_flops), ("refused programs", wiring.refused_programs),
                   ("tokenizers", reading.tokenizers), ("prepared", reading.prepared),
                   ("session failed", sessions.failed), ("session refused", sessions.refused),
                   ("before a step", session_ranks.before_a_step), ("watched", session_ranks.watched),
                   ("board", saying.board), ("console gone", saying.gone), ("logged", saying.logged), ("signals", saying.signals),
                   ("long reads", saying.long_reads), ("starts", saying.starts),
                   ("places", origins.places), ("distributions", origins.distributions),
                   ("door", barred.door), ("mappings", barred.mappings), ("looked", barred.looked), ("stands", barred.stands),
                   ("descendants", barred.descendants), ("unloads", barred.unloads),
                   ("needs", room.needs), ("limits", room.limits), ("planned", room.plans), ("executors", room.executors),
                   ("examined", room.examined),
                   ("collectives", spent.collectives), ("recorded", spent.recorded), ("saves", spent.saves), ("peaks", spent.peaks),
                   ("hashes", spent.hashes),
                   ("there and back", hubs.there_and_back), ("beginnings", hubs.beginnings), ("tokenizer files", hubs.tokenizer_files),
                   ("sampled text", hubs.sampled_text),
                   ("made", run_dirs.made), ("manifests", run_dirs.manifests), ("homes", run_dirs.homes), ("sources", run_dirs.sources),
                   ("listed", run_dirs.listed),
                   ("slurm", clusters.slurm), ("hosts", clusters.hosts), ("seats", clusters.seats),
                   ("meetings", launches.meetings), ("started", launches.started), ("lives", launches.lives),
                   ("looked after", launches.looked_after), ("verdicts", launches.verdicts),
                   ("spots changed", looks.changed), ("pieces", looks.pieces), ("tallied", looks.tallied),
                   ("spots drawn", looks.drawn), ("paced", looks.paced), ("spaced", looks.spaced),
                   ("texts", validated.texts), ("one at a time", validated.one_at_a_time), ("cuts", validated.cuts)],
    }
}
