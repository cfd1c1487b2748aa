"""A soak of random collectives among random numbers of ranks under random faults: `python suites/support/soak.py --minutes 30`.

Each job draws members, collectives and one fault, or none, from a seed that is printed when something is wrong. Pass: bits are right until
the fault; every other rank then ends by itself within the bound and names the rank at fault; an undisturbed job ends without an error;
nothing is left in /dev/shm and no process stays. `--each N` runs N jobs of every fault in place of minutes. `--counts FILE` holds the
counts after every job as JSON, so that they outlive a soak that is killed; one that is interrupted prints them too, and ends with 130.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from shm import apart, nothing_left

from alpha.comm import collectives
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.gates.contracts.ranks.calls import ALGORITHMS, COUNTS, DTYPES, OPS, misbehave, one, summed
from alpha.gates.contracts.ranks.members import Ended, Members

FAULTS = ("none", "dies", "stops", "raises", "exits", "flips")
BOUND_S = 5.0
"""Seconds within which every other rank ends, without what ranks wait for processors; waits give up after a fifth of that."""


def job(world: World, seed: int, fault: str, victim: int, at: int, calls: int) -> list[str]:
    """`calls` random collectives; before number `at` the victim has its fault, sometimes late, between two messages of a collective."""
    group, rng, wrong = world.group(WORLD), np.random.default_rng(seed), []
    for i in range(calls):
        op, dtype = OPS[rng.integers(len(OPS))], DTYPES[rng.integers(len(DTYPES))]
        algorithms, count = ALGORITHMS.get(op, ("",)), COUNTS[rng.integers(len(COUNTS))]
        algorithm, reduce, in_place = algorithms[rng.integers(len(algorithms))], ("sum", "average")[rng.integers(2)], bool(rng.integers(2))
        inside = int(rng.integers(0, 4))
        if i == at and world.rank == victim and fault != "none":
            if inside and fault != "flips":
                _between_messages(world, fault, inside)
            else:
                misbehave(world, fault)
        world.step = i
        if summed(op, dtype, reduce):
            wrong.append(one(group, op, dtype, count, algorithm=algorithm, reduce=reduce, in_place=in_place, seed=i))
    own, every = np.full(1, world.rank), np.empty(world.size, np.int64)
    for _ in range(4):  # at each of them the victim sends everyone a message that is not empty, so that there is a bit to flip
        collectives.all_gather(group, own, every, algorithm="direct")
        wrong += [] if list(every) == list(range(world.size)) else [f"gathered {every}"]
    return [w for w in wrong if w]


def _between_messages(world: World, fault: str, messages: int) -> None:
    """Have the fault when so many more messages have been handed over."""
    transport, left = world.group(WORLD).transport, [messages]
    send = transport.send

    def counted(*given: object, **words: object) -> None:
        left[0] -= 1
        if not left[0]:
            misbehave(world, fault)
        send(*given, **words)  # type: ignore[arg-type]

    transport.send = counted  # type: ignore[method-assign]


def judged(ended: list[Ended], fault: str, victim: int) -> str:
    """'' when the job ended as it should."""
    if fault == "none":
        return "" if all(e.result == [] and not e.error for e in ended) else f"an undisturbed job: {ended}"
    for rank, e in enumerate(ended):
        if rank != victim and (e.hung or e.served > BOUND_S or e.rank != victim or (e.result or [])):
            return f"rank {rank}: {e}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--each", type=int, help="jobs of every fault, in place of minutes")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--counts", type=Path, help="file of the counts so far")
    args = parser.parse_args()
    rng, started, code = np.random.default_rng(args.seed), time.monotonic(), 0
    counts, wrong, slowest = Counter[str](), [], dict.fromkeys(args.faults, 0.0)
    drawn = [f for f in args.faults for _ in range(args.each or 0)]
    apart()
    with nothing_left(), Members(apart=True) as members:
        try:
            while drawn if args.each else time.monotonic() - started < 60 * args.minutes:
                fault = drawn.pop() if args.each else str(rng.choice(args.faults))
                size, seed, calls = int(rng.integers(2, 7)), int(rng.integers(1 << 31)), 30
                victim, at = int(rng.integers(size)), int(rng.integers(calls - 4))
                ended = members.run(job, size, seed, fault, victim, at, calls, deadlines=Deadlines(stall=1.0), payload_bytes=4096,
                                    slots=2, limit_s=600)
                slowest[fault] = max(slowest[fault], *(e.seconds - ended[victim].beat for i, e in enumerate(ended) if i != victim))
                counts[fault] += 1
                if found := judged(ended, fault, victim):
                    wrong.append(f"{fault}, {size} ranks, seed {seed}, victim {victim}, call {at}: {found}")
                    print(wrong[-1], flush=True)
                if args.counts:
                    keep(args.counts, args.seed, time.monotonic() - started, counts, slowest, wrong)
        except KeyboardInterrupt:
            code = 130
        for fault in args.faults:
            print(f"{fault:8} {counts[fault]:6} jobs; from the fault to the last end at most {slowest[fault]:.1f} s")
        seconds = time.monotonic() - started
        print(f"seed {args.seed}: {len(wrong)} wrong of {counts.total()} in {seconds:.0f} s{', interrupted' if code else ''}")
    print("nothing left in /dev/shm")
    return code or int(bool(wrong))


def keep(path: Path, seed: int, seconds: float, counts: Mapping[str, int], slowest: Mapping[str, float], wrong: Sequence[str]) -> None:
    """Write what a soak has found so far in place of what the file said: whoever reads it finds one of the two, whole."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"seed": seed, "seconds": round(seconds, 1), "jobs": sum(counts.values()), "wrong": list(wrong),
                               "faults": {f: {"jobs": counts[f], "slowest_s": round(s, 2)} for f, s in slowest.items()}}, indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
