"""The order of a run's sequences after kills, for any number of ranks and threads, to the token: by processes that are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import killed_readers
import numpy as np
import pytest
import warm

from alpha.gates.contracts.data.packing import document_stream

JOBS = ((4, 1), (1, 1), (2, 3), (4, 6), (1, 3))
"""(ranks, microbatches) of a rank, one after the other; all but the last are killed."""


def _sources(root: Path, kind: str) -> Path:
    """Streams of documents of drawn lengths, one a source; each is read for several epochs."""
    rng, folder = np.random.default_rng(3), root / "sources"
    for number, documents in enumerate((90, 60, 120)[: 3 if kind == "mixture" else 1]):
        (folder / str(number)).mkdir(parents=True)
        document_stream(folder / str(number), [int(n) for n in rng.integers(1, 45, documents)])
    return folder


def _due(kind: str, folder: Path) -> dict[int, str]:
    """Step and digest of each sample, as one rank reads them that nothing ends."""
    made = killed_readers.sampler(kind, folder)
    return _held("".join(line for step in range(killed_readers.STEPS)
                         for line in killed_readers.rows(step, made.batch(step, documents=True))).splitlines())  # fmt: skip


def _held(lines: Iterable[str]) -> dict[int, str]:
    """Sample -> 'step digest'; a sample that is there twice has both."""
    found: dict[int, str] = {}
    for line in lines:
        step, sample, digest = line.split()
        found[int(sample)] = "".join((found.get(int(sample), ""), f" {step} {digest}"))
    return found


def _wrong(came: Mapping[int, str], due: Mapping[int, str]) -> list[int]:
    """Samples that are missing, too many, or hold something else."""
    return sorted(sample for sample in came.keys() | due.keys() if came.get(sample) != due.get(sample))


@pytest.mark.parametrize("kind", ["windows", "packed", "bucketed", "mixture"])
def test_kills_and_other_ranks_change_no_token(kind: str, tmp_path: Path) -> None:
    """Each time by other ranks, microbatches and depths of what is made ahead, from a step that all ranks of the time before had read, or
    an earlier one."""
    folder = _sources(tmp_path, kind)
    rng, due = random.Random(f"order {kind}"), _due(kind, folder)
    kept, begin, met = dict[int, str](), 0, 0
    for attempt, (ranks, micros) in enumerate(JOBS):
        last, depth = attempt == len(JOBS) - 1, rng.choice([0, 1, 3])
        files = [tmp_path / f"{attempt}-{rank}" for rank in range(ranks)]
        each = [warm.start([killed_readers.__file__, kind, folder, rank, ranks, micros, depth, begin, file], stderr=subprocess.PIPE)
                for rank, file in enumerate(files)]
        try:
            wanted = begin + rng.randrange(1, 12)
            deadline = time.monotonic() + 60
            while not last and _steps(files, begin, ranks) < wanted and time.monotonic() < deadline:
                time.sleep(0.001)
            for process in () if last else each:
                process.send_signal(signal.SIGKILL)
            ended = [process.wait(60) for process in each]
            assert set(ended) <= {0} | (set() if last else {-signal.SIGKILL}), ended
            met += ended.count(-signal.SIGKILL)
            said = [process.stderr.read().decode() for process in each if process.stderr is not None]
            assert not any(said), said
        finally:
            for process in each:
                process.kill()
        came = _held(line for file in files if file.exists() for line in file.read_text().splitlines())
        assert not [sample for sample in came if came[sample] != due.get(sample)], f"attempt {attempt}: {ranks} ranks from {begin}"
        end = killed_readers.STEPS if last else max(begin, _steps(files, begin, ranks) - rng.randrange(3))
        kept |= {sample: held for sample, held in came.items() if sample < end * killed_readers.BATCH}
        begin = end
    assert met >= 3, "nothing was killed on its way"
    assert not _wrong(kept, due), f"{len(_wrong(kept, due))} of {len(due)} samples"


def _steps(files: Iterable[Path], begin: int, ranks: int) -> int:
    """The step up to which all ranks have read."""
    share = killed_readers.BATCH // ranks
    return begin + min(file.read_bytes().count(b"\n") // share if file.exists() else 0 for file in files)


def test_one_token_is_seen(tmp_path: Path) -> None:
    """What the test above compares: a sequence of another token, two that are exchanged, one that is lost, one that is read twice."""
    folder = _sources(tmp_path, "windows")
    due, made = _due("windows", folder), killed_readers.sampler("windows", folder)
    batch = made.batch(3, documents=True)
    lines = list(killed_readers.rows(3, batch))
    part = {sample: due[sample] for sample in batch.samples_b.tolist()}
    assert not _wrong(_held(lines), part)
    batch.inputs_bT[5, 7] ^= 1
    assert _wrong(_held(killed_readers.rows(3, batch)), part) == [batch.samples_b[5]]
    batch.inputs_bT[5, 7] ^= 1
    batch.samples_b[[2, 9]] = batch.samples_b[[9, 2]]
    assert len(_wrong(_held(killed_readers.rows(3, batch)), part)) == 2
    assert len(_wrong(_held(lines[:-1]), part)) == len(_wrong(_held([*lines, lines[0]]), part)) == 1
    assert len(_wrong(_held(killed_readers.rows(4, made.batch(3, documents=True))), part)) == killed_readers.BATCH
