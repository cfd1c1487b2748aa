"""`alpha plan`: what a run would be, printed. Floor 9."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from alpha.cli.common import in_its_folder, load_source, require_even_ranks
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cuda_runtime import manifest
from alpha.errors import InputError
from alpha.flops.v1 import CONVENTION, VERSION
from alpha.registry.status import Registry
from alpha.train import rundir
from alpha.train.assemble import components_of
from alpha.train.catalogue import loadable_catalogue
from alpha.train.console import Printer
from alpha.train.planned import Planned, exchanges, plan_run


def cmd_plan(args: argparse.Namespace) -> int:
    """What a run would be. Nothing of it is allocated and no text is read, so a plan of 70 billion parameters takes seconds."""
    cfg, path = load_source(args.source, args.set), Path(args.source)
    printer = Printer(Console(highlight=False, soft_wrap=True))  # its text is the result: none of it is dropped
    vocabulary = rundir.read_tokenizer(path).vocab_size if path.is_dir() else None
    with ExitStack() as folder:
        try:
            folder.enter_context(in_its_folder(args.source, cfg))
        except InputError as error:  # no text is read: a run whose text is gone is planned all the same
            printer.say(f"{error.what}: {error.came}; paths are those of this folder", "yellow")
        return _plan(args, cfg, vocabulary, printer)


def _plan(args: argparse.Namespace, cfg: Config, vocabulary: int | None, printer: Printer) -> int:
    """Print what a run of `cfg` would be; its paths are those of the working folder."""
    if args.nproc != 1:
        require_even_ranks(cfg, args.nproc)
    with printer.doing("building the program"):
        catalogue = loadable_catalogue()
        plan = _planned(cfg, catalogue, vocabulary, args.nproc)
    program, flops = plan.program, plan.flops
    if args.table is not None:
        if args.table not in program.plans:
            raise InputError("no such Segment", came=args.table, expected=", ".join(sorted(program.plans)), do="name one of these")
        printer.say(program.plans[args.table].table())
        return 0
    printer.say(f"program      {program.name}  {program.hash()[:16]}; vocabulary {plan.vocabulary:,} ({plan.vocabulary_source})")
    printer.say(f"parameters   {plan.parameters:,}")
    printer.say(f"tokens       {plan.tokens_per_step:,} a step, {plan.tokens_per_step * plan.steps:,} in all")
    printer.say(f"model FLOPs  {flops.per_token / 1e6:,.3f} MFLOP a token, {plan.model_flops_per_step / 1e12:,.4f} TFLOP a step "
                f"by {VERSION} ({CONVENTION})")  # fmt: skip
    printer.say(
        f"             {flops.per_token_full_attention / 1e6:,.3f} a token with full attention, {flops.per_token_6n / 1e6:,.3f} by 6N, "
        f"{plan.executed / plan.tokens_per_step / 1e6:,.3f} executed"
    )
    printer.say(f"FLOPs        {'MFLOP a token by the model':>26} {'executed':>14} {'share':>7}  part, direction")
    for (part, direction), (useful, done) in plan.parts.items():
        each = [n / plan.tokens_per_step / 1e6 for n in (useful, done)]
        printer.say(f"             {each[0]:26,.3f} {each[1]:14,.3f} {done / plan.executed:7.2%}  {part}, {direction}")
    each = [n / plan.tokens_per_step / 1e6 for n in (plan.model_flops_per_step, plan.executed)]
    printer.say(f"             {each[0]:26,.3f} {each[1]:14,.3f} {1:7.2%}  together")
    for kind, n in plan.state_bytes.items():
        printer.say(f"state        {n:20,} bytes {n / 2**30:10.3f} GiB  {kind}")
    for name, n in plan.activations.items():
        memory = program.plans[name].memory
        printer.say(f"activations  {n:20,} bytes {n / 2**30:10.3f} GiB  {name} ({len(program.plans[name].launches)} launches; "
                    f"lower bound {memory.lower:,}, unshared {memory.total:,})")  # fmt: skip
    for arena, n in plan.arenas.items():
        printer.say(f"arena        {n:20,} bytes {n / 2**30:10.3f} GiB  {arena}")
    where = "the one device" if args.nproc == 1 else "rank 0"
    printer.say(f"peak         {plan.peak_bytes:20,} bytes {plan.peak_bytes / 2**30:10.3f} GiB  on {where}")
    for e in exchanges(program):
        x = e.launch
        text = "no text" if e.shard is None else f"shard {e.shard}, microbatch {e.micro}"
        printer.say(f"exchange     {e.nbytes:20,} bytes  {x.op} of {x.layer or 'all'}, group {x.attrs['group']}, stream {x.stream}, "
                    f"{e.plan} ({text})")  # fmt: skip
    registry = Registry(catalogue)
    wanted = components_of(cfg, program)
    with manifest.only_looking():
        missing = [i for i in wanted if not registry.status(i).usable]
    printer.say(f"components   {len(wanted)}, of which {len(wanted) - len(missing)} usable on {registry.machine.key}")
    for i in wanted:
        status = registry.status(i)
        printer.say(f"             {'usable    ' if status.usable else 'NOT USABLE'} {i}" + ("" if status.usable else
                    f" ({', '.join(status.missing) or 'presupposes what is not'})"))  # fmt: skip
    for module, why in catalogue.broken.items():
        printer.say(f"broken       {module}: {why}; nothing runs before it is mended", "red")
    return 0


def _planned(cfg: Config, catalogue: Catalogue, vocabulary: int | None, ranks: int) -> Planned:
    """The plan from the kernels that load; where one is missing whose file does not, the error says so."""
    try:
        return plan_run(cfg, catalogue, vocabulary, ranks)
    except InputError as error:
        if not catalogue.broken:
            raise
        broken = "; ".join(f"{m}: {why}" for m, why in catalogue.broken.items())
        raise type(error)(error.what, came=error.came, expected=error.expected, do=f"mend what cannot be loaded: {broken}") from error
