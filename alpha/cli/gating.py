"""`alpha gate run`, `check` and `catches`: from options to the functions of gates/commands.py. Floor 9."""

from __future__ import annotations

import argparse

from alpha.cli.common import load_source
from alpha.errors import InputError
from alpha.gates import commands
from alpha.gates.adversarial import mutants
from alpha.registry import admission
from alpha.train.assemble import components_of, open_data, program_for, threads_for
from alpha.train.catalogue import catalogue


def cmd_gate_run(args: argparse.Namespace) -> int:
    """Run gates of the components named, of those that a run uses, or of all."""
    ids = list(args.ids)
    if args.run_file is not None:
        cfg = load_source(args.run_file, args.set)
        program = program_for(cfg, open_data(cfg).tokenizer.vocab_size, catalogue(), threads_for(cfg))
        ids += admission.needed(catalogue(), components_of(cfg, program))
    elif args.set:
        raise InputError("--set changes a run file, and none is given", came=" ".join(args.set), expected="--for RUN.toml")
    return commands.cmd_run(sorted(set(ids)), gate=args.gate, stale=args.stale, budget=args.budget, ship=args.ship)


def cmd_gate_check(args: argparse.Namespace) -> int:
    """The merge gate."""
    return commands.cmd_check(annotate=args.annotate, reference=args.reference)


def cmd_gate_catches(args: argparse.Namespace) -> int:
    """Planted faults and mutants."""
    default = 0 if args.prefixes and "mutants" not in args.prefixes else mutants.NUMBER
    return commands.cmd_catches(args.prefixes, stale=not args.all, seeded=default if args.seeded is None else args.seeded, seed=args.seed,
                                ship=args.ship, workers=args.workers, prepare=args.prepare)
