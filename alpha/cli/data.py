"""`alpha data`: own files to shards, what is in them, and whether they are whole. Floor 9."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from alpha.cli.common import shown, this_command
from alpha.cores import cores
from alpha.data import inspect
from alpha.data.prepare import SAMPLE, Order, prepare
from alpha.data.prepared import SIDES, Prepared, open_prepared
from alpha.data.sources import PART, Rules
from alpha.errors import InputError, visible
from alpha.files import path_argument
from alpha.train.sample import printable


def arguments(data: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "text files, JSON lines and Parquet to shards that a run trains on; run again, it goes on"
    p = actions.add_parser("prepare", help=text, description=text)
    p.set_defaults(run=cmd_prepare)
    p.add_argument("sources", nargs="+", type=path_argument, metavar="SOURCE", help="a file, a folder, or a glob in quotes")
    p.add_argument("--out", required=True, type=path_argument, metavar="FOLDER", help="where the shards go")
    p.add_argument("--field", default="text", metavar="NAME", help="of the text in JSON and Parquet (default %(default)s)")
    p.add_argument("--label", action="append", default=[], metavar="NAME", help="a field whose values are counted, such as language; "
                   "may be repeated")  # fmt: skip
    p.add_argument("--tokenizer", default="bpe:512", metavar="bytes|bpe:N|FILE", help="ids of bytes, N ids learned from the text, or a "
                   "tokenizer's file (default %(default)s)")  # fmt: skip
    p.add_argument("--sample", type=int, default=SAMPLE, metavar="BYTES", help="text that bpe:N learns from, at most (default %(default)s)")
    p.add_argument("--validation", type=float, default=0.05, metavar="SHARE", help="of documents, by their content (default %(default)s)")
    p.add_argument("--part", type=int, default=PART, metavar="BYTES", help="a longer text file is several documents (default %(default)s)")
    p.add_argument("--skip-bad", action="store_true", help="count lines and rows that are no document, instead of ending")
    p.add_argument("--licence", default="", metavar="TEXT", help="of the texts, kept with the data")
    p.add_argument("--workers", type=int, default=cores(), metavar="N",
                   help="processes (default: one a core, here %(default)s); changes no byte")
    for name, run, text in (("inspect", cmd_inspect, "statistics and samples of prepared data"),
                            ("verify", cmd_verify, "read every byte of prepared data, and name what is damaged")):
        p = actions.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        p.add_argument("folder", type=path_argument, metavar="FOLDER", help="that `alpha data prepare` made")
        if name == "inspect":
            p.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default %(default)s)")
            p.add_argument("--json", action="store_true", help="for programs")


def _at_least(least: int, **given: int) -> None:
    """InputError for the first option below `least`."""
    for name, came in given.items():
        if came < least:
            raise InputError(f"--{name} is a number of at least {least}", came=came, expected=f"{least} or more", do="leave it out")


def cmd_prepare(args: argparse.Namespace) -> int:
    """Prepare, with a bar on a terminal."""
    _at_least(1, sample=args.sample, workers=args.workers)
    rules = Rules(field=args.field, labels=tuple(args.label), part=args.part, skip_bad=args.skip_bad)
    order = Order(tuple(args.sources), rules, args.tokenizer, args.validation, args.licence, args.sample)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading the sources", total=None)
        made = prepare(order, Path(args.out), workers=args.workers,
                       told=lambda done, total: bar.update(task, description="making shards", completed=done, total=total))
    _introduce(made)
    corpus = f"data.corpus={json.dumps(shown(made.folder), ensure_ascii=False)}"  # quoted: --set reads `12` as a number
    print(f"train on it: {this_command()} train RUN.toml --set {shlex.quote(corpus)}")
    return 0


def _line(text: str) -> str:
    """What a file says, fit for one line of a terminal."""
    return visible(text).replace("\n", "\\n")


def _introduce(data: Prepared) -> None:
    facts = data.facts
    for source in facts["sources"]:
        held = f"{source['files']:,} files, {source['documents']:,} documents, {source['text_bytes']:,} bytes"
        print(f"source      {_line(source['name'])}: {held}")
    print(f"licence     {_line(facts['licence']) or 'not given'}")
    print(f"tokenizer   {data.tokenizer.kind}, {data.tokenizer.vocab_size:,} ids, {data.tokenizer.hash[:16]}")
    for side in SIDES:
        stream = data.streams[side]
        size = f"{len(stream):,} tokens, {stream.text_bytes:,} bytes, {len(stream.shards):,} shards"
        print(f"{side:11} {stream.documents:,} documents, {size}")
    print(f"left out    {facts['empty']:,} empty, {facts['bad']:,} bad")


def cmd_inspect(args: argparse.Namespace) -> int:
    """Statistics of both sides."""
    _at_least(0, samples=args.samples)
    data = open_prepared(Path(args.folder))
    found = inspect.statistics(data)
    if args.json:
        print(json.dumps({**data.facts, "statistics": {side: asdict(one) for side, one in found.items()}}, indent=2))
        return 0
    _introduce(data)
    for label, values in data.facts["labels"].items():
        most = sorted(values.items(), key=lambda item: (-item[1], item[0]))
        more = f" and {len(most) - 20:,} more" if len(most) > 20 else ""
        print(_line(f"{label}: {', '.join(f'{value} {n:,}' for value, n in most[:20])}{more}"))
    for side, one in found.items():
        fewest, median, mean, high, longest = one.lengths
        print(f"{side}: tokens a document: fewest {fewest:,.0f}, median {median:,.0f}, mean {mean:,.1f}, 95 % below {high:,.0f}, "
              f"most {longest:,.0f}")  # fmt: skip
        print(f"{side}: {one.text_bytes / one.tokens:.2f} bytes and {one.entropy:.2f} bits of entropy a token; {one.used:,} of "
              f"{one.vocabulary:,} ids occur; {one.duplicates:,} exact duplicates")  # fmt: skip
    for number, text in enumerate(inspect.samples(data, args.samples)):
        print(f"-- sample {number}\n{printable(text)}")
    return 0


def cmd_verify(args: argparse.Namespace) -> int:
    """Every block, every id."""
    data = open_prepared(Path(args.folder), verify=True)
    shards = [shard for side in SIDES for shard in data.streams[side].shards]
    print(f"whole: {sum(shard.blocks for shard in shards):,} blocks in {len(shards):,} shards, listings, tokenizer, description")
    return 0
