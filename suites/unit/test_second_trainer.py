"""The run as a component: drawn run files, run by `alpha lab`, against the dull trainer; and wrong wirings that it has to see.

`--all` runs more draws and every wiring; `python suites/support/compare_trainers.py 0 100` runs as many as one likes.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sqlite3
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
from compare_trainers import problems
from drawn_runs import draw
from dull_trainer import DullTrainer, tomllib
from watched_run import watched
from wrong_wiring import seen, wirings

from alpha import config
from alpha.data.corpus import open_corpus
from alpha.train.assemble import open_data

ROOT = Path(__file__).parents[2]
FAR = 400
"""Draws above this number are those of sessions; below are those that wirings are shown by."""

UNMOVED = {
    "machine.debug": "it is about many ranks, and these runs have one",
    "machine.backend": "the CPU is the back end of every machine that runs this",
    "log.tensorboard": "it is a process beside the run; suites/unit/test_trackers.py holds what it writes",
    "log.wandb": "as log.tensorboard",
    "data.tokenizer_file": "the second trainer trains its tokenizers; suites/unit/test_tokenizer_hf.py holds files against another library",
    "data.tokenizer_end": "it names a token of such a file",
    "train.start_from": "initial weights are drawn here; suites/unit/test_hf.py holds what begins from others",
    "train.precision": "f32 is the only precision that the CPU computes in",
}
"""Keys that no draw moves, and why."""


def test_runs_do_what_their_file_says(pytestconfig: pytest.Config, seed: int, tmp_path: Path) -> None:
    """One draw of each family and optimizer, or ten."""
    first = FAR + 4 * random.Random(f"{seed} second trainer").randrange(10**6)
    wrong = []
    for number in range(first, first + (40 if pytestconfig.getoption("--all") else 4)):
        file = draw(number, tmp_path / str(number))
        wrong += [f"draw {number}: {what}" for what in problems(file, watched(file, tmp_path / str(number) / "runs" / "drawn"))]
    assert not wrong, "\n".join(wrong[:20])


def test_a_name_that_exists_is_no_pattern(tmp_path: Path) -> None:
    """As in a run: marks are marks where nothing has that name."""
    folder = tmp_path / "texts [1]"
    folder.mkdir()
    for name in ("a[1].txt", "a1.txt", "b.md"):
        (folder / name).write_text(f"{name}\n" * 20)
    (tmp_path / "texts 1").mkdir()
    (tmp_path / "texts 1" / "c.txt").write_text("c\n")
    dull = DullTrainer.__new__(DullTrainer)
    for name in ("texts [1]", "texts [1]/a[1].txt", "texts [1]/a*.txt", "texts [1]/a?.txt", "texts ?/*.txt"):
        found = dull.files(str(tmp_path / name))
        assert {path.decode(): text for path, text in found.items()} == {
            path: text.encode() for path, text in alphas(tmp_path / name).items()}, name


def alphas(source: Path) -> dict[str, str]:
    """The texts of a source as a run reads them."""
    corpus = open_corpus(str(source))
    return {d.relpath: (corpus.root / d.relpath).read_text() for d in corpus.documents}


def test_a_nan_agrees_with_nothing(tmp_path: Path) -> None:
    file = draw(FAR, tmp_path / "drawn")
    ran = watched(file, tmp_path / "drawn" / "runs" / "drawn")
    ran.metrics[0] = (float("nan"), *ran.metrics[0][1:])
    done, _, *rest = ran.evaluations[0]
    ran.evaluations[0] = (done, float("nan"), *rest)
    logits = ran.decodes[-1][2]["logits"]
    logits[0, logits[0].argmin()] = float("nan")
    found = list(problems(file, ran))
    for part in ("loss nan", f"validation after {done}: nan nats", "logits nan apart"):
        assert any(part in what for what in found), (part, found)


def test_a_sample_smaller_than_its_first_text_learns_from_its_beginning(tmp_path: Path) -> None:
    """Sources of one file and of many, and mixtures: what a tokenizer learns is what the second trainer learns from the same run file."""
    cut = 0
    for number in range(FAR, FAR + 12):
        file = draw(number, tmp_path / str(number))
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        tables["data"] |= {"tokenizer": "bpe", "vocab": 259, "sample": random.Random(number).randrange(60, 200)}
        file.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
                                for name, keys in tables.items()), encoding="utf-8")  # fmt: skip
        dull = DullTrainer(file)
        cut += any(len(text) > tables["data"]["sample"] for texts, _ in dull.sides for text in texts.values())
        assert [tuple(merge) for merge in open_data(config.load(file)).tokenizer.form()["merges"]] == dull.merges, number
    assert cut > 3, "no sample was smaller than a text"


def test_waits_for_data_are_told_of_every_step(tmp_path: Path) -> None:
    """Also of those whose first batches are asked for in the step before; and none where nothing is made ahead."""
    for number, ahead in ((FAR + 1, True), (FAR + 2, False)):
        file = draw(number, tmp_path / str(number))
        dull = DullTrainer(file)
        assert bool(dull.tables["data"]["prefetch"]) == ahead
        watched(file, tmp_path / str(number) / "runs" / "drawn")
        with closing(sqlite3.connect(tmp_path / str(number) / "runs" / "drawn" / "metrics.sqlite")) as db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            assert ("data_waits" in tables) == ahead
            columns = "step, rank, batches, ready BETWEEN 0 AND batches, wait_ns >= 0, made_ns > 0"
            rows = db.execute(f"SELECT {columns} FROM data_waits") if ahead else ()
            assert list(rows) == [(step, 0, dull.shards * dull.micros, 1, 1, 1) for step in range(dull.steps if ahead else 0)]


def test_wrong_wirings_are_seen(pytestconfig: pytest.Config, seed: int) -> None:
    every = wirings()
    chosen = every if pytestconfig.getoption("--all") else random.Random(f"{seed} wirings").sample(every, 4)
    unseen = [w.id for w in chosen if not seen(w.file, w.text, w.draw, 1)[1]]
    assert not unseen, f"seed {seed}: {unseen}"


def test_wirings_still_fit_the_code() -> None:
    """Each text stands once in its file; ids are unique."""
    rows = wirings()
    assert len({w.id for w in rows}) == len(rows) >= 30
    assert not [w.id for w in rows if (ROOT / w.file).read_text(encoding="utf-8").count(w.find) != 1]


def test_the_handbook_counts_the_wirings() -> None:
    stated = re.search(r"(\d+) of (\d+) wrong wirings are seen", (ROOT / "docs" / "gates.md").read_text(encoding="utf-8"))
    assert stated and stated.groups() == (str(len(wirings())),) * 2


def test_draws_move_every_key(tmp_path: Path) -> None:
    """Away from its default; and every choice of a key is drawn."""
    tables = [tomllib.loads(draw(seed, tmp_path / str(seed)).read_text()) for seed in range(12)]
    moved, chosen = set(), dict[str, set[object]]()
    for name, section in config._sections().items():
        for f in fields(section):
            values = [table[name][f.name] for table in tables if f.name in table.get(name, ())]
            dotted = f"{name}.{f.name}"
            if any((tuple(v) if isinstance(v, list) else v) != f.default for v in values):
                moved.add(dotted)
            if f.metadata["choices"] and dotted not in UNMOVED:
                chosen[dotted] = set(f.metadata["choices"]) - set(values)
    every = {f"{name}.{f.name}" for name, section in config._sections().items() for f in fields(section)}
    assert every - moved == set(UNMOVED)
    assert not {k: v for k, v in chosen.items() if v}


def test_draws_go_into_later_epochs(tmp_path: Path) -> None:
    trainers = [DullTrainer(draw(seed, tmp_path / str(seed))) for seed in range(12)]
    assert sum(d.steps * d.batch > sum(map(d.windows, d.train)) for d in trainers) >= 3
    assert sum(any(d.tables["train"]["eval_windows"] < d.windows(s) for s in d.validation) for d in trainers) >= 3


def test_the_dull_trainer_imports_nothing_of_alpha() -> None:
    tree = ast.parse((ROOT / "suites" / "support" / "dull_trainer.py").read_text(encoding="utf-8"))
    names = {n.module.split(".")[0] if isinstance(n, ast.ImportFrom) else a.name.split(".")[0]
             for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    assert names <= {*sys.stdlib_module_names, "numpy", "tomli"}
