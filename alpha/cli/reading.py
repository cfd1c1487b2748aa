"""`alpha sample`, `trace` and `doctor`: what is printed of a run that is there, and of this machine. Floor 9."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alpha.cli.common import this_command
from alpha.cuda_runtime import manifest
from alpha.errors import InputError, MachineError
from alpha.profile import trace
from alpha.train import doctor, hub, rundir
from alpha.train.catalogue import catalogue, loadable_catalogue
from alpha.train.sample import generate, open_run, printable
from alpha.train.seal import why_ungated


def cmd_sample(args: argparse.Namespace) -> int:
    """Write a sample to standard output as it is made."""
    prompt = os.fsencode(args.prompt)
    if args.source.startswith(hub.PREFIX):
        if args.at is not None:
            raise InputError("a model of Hugging Face has no steps", came=f"--at {args.at}", expected="no --at")
        executor, tokenizer = hub.open_model(args.source, catalogue(), prompt, args.tokens)
        what, why = args.source, "its parameters come from elsewhere"
    else:
        executor, tokenizer, step = open_run(Path(args.source), catalogue(), args.at)
        what, why = f"step {step}", why_ungated(Path(args.source))
    with executor:
        if why:
            print(f"{rundir.UNGATED}: sampled from a development run ({why})", file=sys.stderr)
        print(f"{what}, temperature {args.temperature}, top-k {args.top_k}, seed {args.seed}", file=sys.stderr)
        parts = generate(executor, tokenizer, prompt, tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
        print(printable(prompt + b"".join(parts)), flush=True)
    return 0


def cmd_trace(args: argparse.Namespace) -> int:
    """Write the trace of a run."""
    path = Path(args.source)
    rundir.read_config(path)
    out = Path(args.out) if args.out else path / "traces" / "profiled.json.gz"
    if not args.out:
        try:
            out.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise MachineError("the trace cannot be written into the run directory", came=f"{out.parent} ({error.strerror})",
                               expected="permission to write there", do="name another file: --out FILE") from error
    found = trace.write(path / "metrics.sqlite", out, args.step, args.rank, ungated=bool(why_ungated(path)))
    steps = f"{len(found.steps)} steps ({found.steps[0]} to {found.steps[-1]})"
    waits = f", {found.waits:,} between ranks" if found.waits else ""
    print(f"{out}: {found.events:,} events of {steps}, {found.arrows:,} arrows{waits}")
    print("open it at https://ui.perfetto.dev (the file stays on this machine) or in chrome://tracing")
    return 0


def cmd_doctor(args: argparse.Namespace) -> int:
    """Look at the machine; exit code 3 if nothing can be trained here."""
    with manifest.only_looking():
        findings = doctor.examine(loadable_catalogue())
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        style = {doctor.OK: "green", doctor.MISSING: "red", doctor.NOTE: "yellow"}
        for f in findings:
            table.add_row(Text(f.state, style[f.state]), f.topic, Text(f.found + (f"\n  -> {f.do}" if f.do else "")))
        Console(highlight=False).print(table)
        if doctor.can_train(findings):
            print(f"this machine can train on its CPU:  {this_command()} train configs/demo.toml")
        else:
            print("this machine cannot train: see the lines marked missing")
    return 0 if doctor.can_train(findings) else 3
