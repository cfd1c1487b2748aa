"""`alpha checkpoint`: what is done with checkpoints beside training. Floor 9."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from alpha.checkpoint import folders, offline
from alpha.checkpoint.safetensors import MOST_SHARD
from alpha.files import path_argument
from alpha.train import hub, rundir
from alpha.train.catalogue import loadable_catalogue
from alpha.types import ITEMSIZE


def arguments(checkpoint: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (("inspect", cmd_inspect, "what a checkpoint holds, as its manifest says; reads no state"),
                            ("verify", cmd_verify, "read all of a checkpoint and check every byte of it")):
        p = actions.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        p.add_argument("source", type=path_argument, metavar="RUN[@STEP]", help=SOURCE)
    text = "lay a checkpoint out anew, as another number of ranks would have saved it; any number loads it either way"
    p = actions.add_parser("reshard", help=text, description=text)
    p.set_defaults(run=cmd_reshard)
    p.add_argument("source", type=path_argument, metavar="RUN[@STEP]", help=SOURCE)
    p.add_argument("--ranks", type=_ranks, required=True, metavar="N", help="how many files of state it is to have")
    p.add_argument("--out", type=path_argument, required=True, metavar="FOLDER", help="where its folder step-... is made")
    text = "write a run's checkpoint as a model that Hugging Face's transformers loads"
    p = actions.add_parser("export", help=text, description=text)
    p.set_defaults(run=cmd_export)
    p.add_argument("source", type=path_argument, metavar="RUN[@STEP]", help=SOURCE.partition(", or")[0])
    p.add_argument("--format", choices=("hf",), default="hf", help="safetensors, config.json and tokenizer.json (default %(default)s)")
    p.add_argument("--out", type=_new_folder, required=True, metavar="FOLDER", help="a folder that is not there yet")
    p.add_argument("--max-shard-size", type=_shard_bytes, default=MOST_SHARD, metavar="GB",
                   help=f"most gigabytes of tensors in one file (default {MOST_SHARD / 1e9:g}); a larger model is several, with an index")
    text = "make a run directory of a model of Hugging Face, to sample from, export, or begin from"
    p = actions.add_parser("import", help=text, description=text)
    p.set_defaults(run=cmd_import)
    p.add_argument("source", type=path_argument, metavar="hf:FOLDER", help="a folder with config.json, safetensors and tokenizer.json")
    p.add_argument("--out", type=_new_folder, required=True, metavar="RUN", help="a run directory that is not there yet")


MOST_RANKS = 65_536
"""Files of one checkpoint."""


def _ranks(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_RANKS} ranks")
    return count


def _new_folder(text: str) -> Path:
    path = Path(path_argument(text))
    if not path.name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that a folder can get")
    return path


def _shard_bytes(text: str) -> int:
    """Bytes of so many gigabytes."""
    size = float(text)
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: expected gigabytes above 0")
    return max(1, int(size * 1e9))


def cmd_import(args: argparse.Namespace) -> int:
    """Make a run directory of a model."""
    path = hub.import_model(args.source, args.out, loadable_catalogue())
    print(f"{path}: {args.source} as checkpoint 0")
    return 0


SOURCE = "a run directory, and which checkpoint of it (default: the latest), or the folder of one checkpoint"


def _checkpoint(source: str) -> Path:
    """The folder that RUN[@STEP] means, or that was given."""
    path, step = hub.at_step(source)
    if step is None and (path / folders.MANIFEST).is_file() and not rundir.is_run(path):
        return path
    return folders.at(path / "checkpoints", step)


def cmd_inspect(args: argparse.Namespace) -> int:
    """Print the manifest's content, without the lists of tensors."""
    path = _checkpoint(args.source)
    saved = folders.inspect(path, verify=False)
    print(f"{path}: step {saved.step}, saved by {len(saved.indexes) or 1} rank{'s' * (len(saved.indexes) > 1)}")
    for kind in saved.kinds:
        layout = saved.layout(kind)
        elements, item = sum(t.size for t in layout.tensors), ITEMSIZE[layout.dtype]
        print(f"  {kind}: {len(layout.tensors):,} tensors, {elements:,} elements of {layout.dtype}, {elements * item:,} bytes")
    for name, fact in saved.facts.items():
        print(f"  {name}: {json.dumps(fact)}")
    return 0


def cmd_verify(args: argparse.Namespace) -> int:
    """Check every byte; CorruptError (exit code 2) names what is damaged."""
    path = _checkpoint(args.source)
    saved = folders.inspect(path)
    print(f"{path}: step {saved.step} is whole; {sum(of.size for of in saved.files()):,} bytes of state were checked")
    return 0


def cmd_reshard(args: argparse.Namespace) -> int:
    """Write the same state, in files of another number of ranks."""
    path = _checkpoint(args.source)
    print(f"{path} as {args.ranks} rank{'s' * (args.ranks > 1)} would have saved it: {offline.relay(path, Path(args.out), args.ranks)}")
    return 0


def cmd_export(args: argparse.Namespace) -> int:
    """Write a model into a new folder."""
    path, step = hub.at_step(args.source)
    step, why = hub.export_run(path, step, args.out, args.max_shard_size)
    print(f"{args.out}: step {step} of {path}" + (f"; without tokenizer.json, for {why}" if why else ""))
    return 0
