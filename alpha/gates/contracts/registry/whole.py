"""What the merge gate reads and prints, whole: lines of drawn evidence and drawn findings, held to a dull account of both. Floor 7."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import HERE, OTHER, folder, make
from alpha.registry import consistency
from alpha.registry.catches import Catch, load_catches, path_of, save_catches
from alpha.registry.check import ERROR, WARNING, Checked, Finding, github, plain
from alpha.registry.evidence import save

MOST = 5
"""Warnings of a folder that are printed one by one."""


def read(rng: np.random.Generator) -> Measured:
    """Every record of evidence and of catches, each with its file, number, name and text; of two classes, of drawn numbers of each. Catches
    are kept sorted by fault; the newer of two stays, and those of faults that are gone do not."""
    checks = Checks()
    for _ in range(6):
        with folder() as root:
            wanted = dict[tuple[str, int], tuple[str, str, str]]()
            for machine in (HERE, OTHER):
                for component in ("made.b", "made.a")[: int(rng.integers(3))]:
                    gates = [g for g in ("determinism", "faults", "gradient", "parity") if rng.random() < 0.7]
                    save([make(g, component=component, machine=machine) for g in gates], root)
                catches = [Catch(fault=f"made.fault-{i}", component="made.a", gate="parity", machine=machine.key, digests={"fault": f"{i}"},
                                 record=make("parity", component="made.a", machine=machine) if rng.random() < 0.6 else None,
                                 error="" if i % 2 else "the process died") for i in rng.permutation(int(rng.integers(1, 7))).tolist()]
                save_catches([replace(c, digests={"fault": "older"}) for c in catches[:3]], root)
                written = save_catches(catches, root)
                checks.that(written == [path_of(root, machine.key)], f"written: {written}")
                found = load_catches(root, machine.key)
                ordered = sorted(catches, key=lambda c: c.fault)
                checks.that([*found.items()] == [(c.fault, c) for c in ordered], f"catches: {found}")
                file = path_of(root, machine.key)
                checks.that(file.read_text() == "".join(c.line() + "\n" for c in ordered), "the file of catches")
                wanted |= {(str(file), i): (c.fault, "made.a", c.line()) for i, c in enumerate(ordered, 1) if c.record is not None}
                for path in (root / machine.key).glob("made.*.jsonl"):
                    for i, text in enumerate(path.read_text().splitlines(), 1):
                        gate = text.partition('"gate":"')[2].partition('"')[0]
                        wanted[str(path), i] = f"{path.stem} {gate}", path.stem, text
            came = [((str(x.path), x.number), (x.about, x.record.component, x.text)) for x in consistency.lines(root)]
            checks.that(dict(came) == wanted and len(came) == len(wanted), f"lines: {came} {wanted}")
            checks.that([at for at, _ in came] == sorted(at for at, _ in came), "lines out of order")
            keep = [c.fault for c in ordered][::2]
            save_catches(ordered[:1], root, keep=keep)
            checks.that([*load_catches(root, OTHER.key)] == keep, "catches of faults that are gone")
    return checks.measured()


def printed(rng: np.random.Generator) -> Measured:
    """Both forms of drawn findings, whole: errors first, then by file, line, name; of a folder's warnings five, and how many more."""
    checks = Checks()
    for _ in range(30):
        found = [Finding((ERROR, WARNING)[int(rng.integers(4) > 0)], f"{'ab'[int(rng.integers(2))]}/{int(rng.integers(3))}.jsonl",
                         int(rng.integers(3)), f"about {i}: a,b", f"what {i}: x, y\n50 %", ("", "mend it")[int(rng.integers(2))])
                 for i in rng.permutation(int(rng.integers(1, 24))).tolist()]
        waiting = {key: int(rng.integers(1, 9)) for key in ("h200", "h100")[: int(rng.integers(3))]}
        checked = Checked(tuple(found), int(rng.integers(3)), int(rng.integers(9)), int(rng.integers(9)), waiting)
        ordered = [f for level in (ERROR, WARNING) for path in sorted({f.path for f in found}) for line in range(3)
                   for f in sorted((f for f in found if (f.level, f.path, f.line) == (level, path, line)), key=lambda f: f.about)]
        lines, more = list[str](), dict[str, int]()
        for f in ordered:
            if f.level == WARNING:
                more[f.path[0]] = more.get(f.path[0], 0) + 1
            if f.level == ERROR or more[f.path[0]] <= MOST:
                lines += [f"{'ERROR  ' if f.level == ERROR else 'WARNING'} {f.path}{f':{f.line}' if f.line else ''}  {f.about}",
                          *f"        {f.what}".split("\n"), *(["        do: mend it"] if f.do else [])]
        renew = "        do: run `alpha gate run --stale --ship` and `alpha gate catches --ship` on such a machine"
        for at in sorted(more):
            lines += [f"WARNING {at}: {more[at] - MOST} more warnings", renew] if more[at] > MOST else []
        for key in sorted(waiting):
            lines += [f"NOT_RUN {key}: {waiting[key]} gates and planted faults await renewal: see above", renew]
        errors = [f for f in found if f.level == ERROR]
        ok = checked.records > 0 and not errors
        many = f"{len(errors)} error{'' if len(errors) == 1 else 's'}, {len(found) - len(errors)} warnings"
        lines.append(f"{'PASS' if ok else 'FAIL'}: {many}; "
                     f"{checked.records} records, {checked.probes} probes and {checked.catches} catches looked at"
                     + ("" if checked.records else ": nothing was there to check"))
        checks.that(plain(checked).split("\n") == lines, f"plain: {plain(checked)}")
        commands = [f"::{f.level} file={f.path},line={f.line or 1},title={f.about.replace(':', '%3A').replace(',', '%2C')}::"
                    f"{f.what.replace('%', '%25')}".replace("\n", "%0A") + (" - mend it" if f.do else "") for f in ordered]
        checks.that(github(checked).split("\n") == commands, f"github: {github(checked)}")
        checks.that(checked.ok == ok, f"ok: {checked}")
    return checks.measured()
