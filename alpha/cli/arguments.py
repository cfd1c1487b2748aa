"""Every command and option of the command line, and the function that each calls. Floor 9."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from alpha import __version__, options
from alpha.bench import command as bench
from alpha.cli import checkpoints, data
from alpha.cli.auditing import audited, cmd_asked, cmd_coverage, cmd_gate_catches, cmd_operating, cmd_pin, cmd_sign
from alpha.cli.gating import cmd_check, cmd_explain, cmd_gate_run, cmd_list, cmd_status
from alpha.cli.planning import cmd_plan
from alpha.cli.reading import cmd_doctor, cmd_sample, cmd_trace
from alpha.cli.training import cmd_train
from alpha.dashboard import command as dashboard
from alpha.files import path_argument
from alpha.gates.device_code import command as kernels_command
from alpha.gates.sanitize import command as sanitize_command
from alpha.gates.timing import pin
from alpha.train import rundir


class _Version(argparse.Action):
    """`alpha 0.1.0 (commit 1234567890ab, with changes)`; the version alone where no commit is known."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        source = rundir.source_state()
        changed = ", with changes" if source["dirty"] else ""
        print(f"alpha {__version__}" + (f" (commit {source['commit'][:12]}{changed})" if source["commit"] != "unknown" else ""))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    top = options.Parser(prog="alpha", description="Gated training and validation of language models.")
    top.add_argument("--version", action=_Version, nargs=0, help="show the version, with the commit in a checkout, and exit")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = subparsers.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        return p

    for name, text in (
        ("train", "train through gated components only"),
        ("lab", "the same, ungated components allowed; stamped UNGATED everywhere"),
    ):
        p = command(name, cmd_train, text)
        p.add_argument("source", type=path_argument, metavar="RUN.toml", help="a run file, or with --resume a run directory")
        _settings(p)
        p.add_argument("--init", metavar="SOURCE", help="begin with the parameters of RUN[@STEP] or hf:FOLDER; sets train.start_from")
        p.add_argument("--resume", action="store_true", help="go on with the newest run of this name, or with the directory given")
        p.add_argument("--continue", action="store_true", dest="go_on", help="go on with the newest run of this name where there is "
                       "one, else begin it: what engines of clusters start again and again")  # fmt: skip
        p.add_argument("--at", type=int, metavar="STEP", help="resume from this checkpoint instead of the latest")
        p.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks to start on this machine (default %(default)s)")
        p.add_argument("--hosts", type=int, metavar="N", help="hosts of the job, each of which runs this command (default: Slurm's, or 1)")
        p.add_argument("--host", type=int, metavar="I", help="which of them this is, from 0 (default: as Slurm or Kubernetes says, or 0)")
        p.add_argument("--meet", default="", metavar="ADDRESS:PORT", help="where host 0 is met; all know the secret ALPHA_SECRET")
        p.add_argument("--restarts", type=int, default=0, metavar="N", help="start again from the last good checkpoint this often, if "
                       "ranks are lost (default %(default)s)")  # fmt: skip
        p.add_argument("--fewest", type=int, metavar="N", help="go on with fewer ranks, down to so many, if restarts get no further "
                       "(default: never)")  # fmt: skip

    p = command("plan", cmd_plan, "parameters, FLOPs, memory and components of a run, without running it")
    p.add_argument("source", type=path_argument, metavar="RUN.toml", help="a run file or a run directory")
    _settings(p)
    p.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of the run, whose exchanges are listed (default %(default)s)")
    p.add_argument("--table", metavar="SEGMENT", help="print one Segment launch by launch, e.g. update or micro_first@0")

    p = command("sample", cmd_sample, "text from a trained model")
    p.add_argument("source", type=path_argument, metavar="RUN", help="a run directory, or hf:FOLDER, a model of Hugging Face")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    p.add_argument("--tokens", type=int, default=200, help="most tokens to add (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 = always the most likely token (default %(default)s)")
    p.add_argument("--top-k", type=int, default=50, help="choose among this many; 0 = all (default %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default %(default)s)")
    p.add_argument("--at", type=int, metavar="STEP", help="from this checkpoint instead of the latest")

    p = command("trace", cmd_trace, "the profiled steps of a run as a trace, for ui.perfetto.dev or chrome://tracing")
    p.add_argument("source", type=path_argument, metavar="RUN", help="a run directory")
    p.add_argument("--out", type=path_argument, metavar="FILE", help="default: traces/profiled.json.gz in the run directory")
    p.add_argument("--step", type=int, action="append", metavar="STEP", help="only this profiled step; may be repeated")
    p.add_argument("--rank", type=int, action="append", metavar="RANK", help="only this rank; may be repeated")

    bench.arguments(command("bench", bench.run, "a kernel, its ceiling and its peers from one run; or a whole training step"))
    dashboard.arguments(command("dashboard", dashboard.run, "where the time goes, live, in a browser"))

    checkpoints.arguments(subparsers.add_parser("checkpoint", help="checkpoints, and models of Hugging Face"))
    data.arguments(subparsers.add_parser("data", help="own text, JSON lines and Parquet to shards, and what is in them"))
    _gate_parsers(subparsers.add_parser("gate", help="gates, evidence and status of every component"))
    kernels_command.arguments(subparsers.add_parser(
        "kernels", help="compile the GPU kernels, and hold them against what is committed; needs no GPU"))  # fmt: skip
    p = command("doctor", cmd_doctor, "what this machine can do, and what is missing")
    p.add_argument("--json", action="store_true", help="for programs")
    return top


def _gate_parsers(gate: argparse.ArgumentParser) -> None:
    actions = gate.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = actions.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        return p

    action("list", lambda a: cmd_list(), "every component, its kind and the gates that it owes")
    p = action("run", cmd_gate_run, "run gates and keep the evidence; resumable")
    p.add_argument("ids", nargs="*", metavar="ID", help="components; none = all")
    p.add_argument("--for", dest="run_file", type=path_argument, metavar="RUN.toml", help="the components that this run uses")
    p.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of the run of --for (default %(default)s)")
    _settings(p)
    p.add_argument("--from", dest="folder", type=path_argument, metavar="FOLDER",
                   help="a kernel in a folder of your own (component.toml), or the name of an installed one")
    p.add_argument("--python", metavar="PATH", help="with --from: the interpreter that has torch or triton")
    p.add_argument("--no-page", action="store_true", help="with --from: write evidence alone")
    p.add_argument("--gate", metavar="GATE", help="only this gate")
    p.add_argument("--stale", action="store_true", help="only what lacks current, passing evidence")
    p.add_argument("--budget", type=_seconds, metavar="SECONDS", help="start nothing after this time; run again to go on")
    p.add_argument("--ship", action="store_true", help="write into the repository's evidence instead of the local one")
    p = action("status", lambda a: cmd_status(as_json=a.json), "what is usable on this machine class")
    p.add_argument("--json", action="store_true", help="for programs")
    p = action("explain", lambda a: cmd_explain(a.id), "what is missing before a component is usable")
    p.add_argument("id", metavar="ID")
    p = action("check", lambda a: cmd_check(annotate=a.annotate, reference=a.reference),
               "the merge gate: judge the committed evidence again; needs no GPU")
    p.add_argument("--annotate", action="store_true", help="as workflow commands, shown beside the lines of a pull request")
    p.add_argument("--reference", metavar="CLASS", help="machine class on which every component must have current evidence")
    p = action("catches", cmd_gate_catches, "planted faults and seeded mutants: is each rejected by the gate that should?")
    p.add_argument("prefixes", nargs="*", metavar="PREFIX", help="only faults whose id or component begins so; without mutants")
    p.add_argument("--all", action="store_true", help="also faults whose catch is current")
    p.add_argument("--seeded", type=_natural, metavar="N", help="fresh mutants; 0 = none")
    p.add_argument("--prepare", action="store_true", help="only compile what the faults in device code load; needs no GPU")
    p.add_argument("--seed", type=_hexadecimal, metavar="HEX", help="draw the mutants from this seed, as a draw printed it")
    p.add_argument("--ship", action="store_true", help="write into the repository's evidence instead of the local one")
    p.add_argument("--workers", type=_records, default=2, help="processes (default %(default)s)")
    sanitize_command.arguments(action("sanitize", lambda a: 0, "kernels of the GPU under compute-sanitizer, sound and with planted errors"))
    p = action("audit", lambda a: audited(changed=a.changed, everything=a.all, n=a.n, seed=a.seed),
               "rerun a random sample of the shipped evidence and compare")
    p.add_argument("--changed", action="store_true", help="only lines that differ from where this branch left the main one; 90 s of them")
    p.add_argument("--all", action="store_true", help="with --changed: all of them; on a quiet machine")
    p.add_argument("-n", type=_records, help="records (default 5)")
    p.add_argument("--seed", type=_natural, help="draw this sample")
    p = action("coverage", lambda a: cmd_coverage(hosts=a.hosts), "branches of the CPU's binders that no sample of their own gates takes")
    p.add_argument("--hosts", action="store_true", help="instead those of what runs on the host, ranks included; minutes")
    p = action("asked", lambda a: cmd_asked(why=a.why), "write anew the list of what is asked of evidence, which the merge gate holds")
    p.add_argument("--why", default="", metavar="TEXT", help="the reason, where less is asked than before or the policy is another one")
    p = action("sign", lambda a: cmd_sign(key=a.key, signer=a.signer, machine=a.machine, everything=a.all),
               "sign the shipped evidence that was measured here, for classes that ask for signatures")
    p.add_argument("--key", type=path_argument, required=True, metavar="FILE", help="an Ed25519 key of OpenSSH without a passphrase")
    p.add_argument("--signer", required=True, metavar="NAME", help="the name that baselines/signers.txt gives this key")
    p.add_argument("--machine", default="", metavar="CLASS", help="machine class (default: the class of this machine's CPU)")
    p.add_argument("--all", action="store_true", help="every line of the class, not only those that differ from where this branch began")
    p = action("pin", lambda a: cmd_pin(a.ids, measurements=a.measurements, add=a.add),
               "measure the shares that the perf gate judges by on this kind of machine")
    p.add_argument("ids", nargs="*", metavar="ID", help="components, wildcards allowed, such as '*.sm90'; none = all that run here")
    p.add_argument("--measurements", type=int, metavar="N",
                   help=f"of each case, in fresh processes (default: CPU {pin.MEASUREMENTS['cpu']}, GPU {pin.MEASUREMENTS['cuda']})")
    p.add_argument("--add", action="store_true", help="to what is pinned already of the same code, from this or another day")
    p = action("operating", lambda a: cmd_operating(a.id, case=a.case, seconds=a.seconds),
               "false-alarm rate and power of the perf gate")
    p.add_argument("id", nargs="?", default="gelu.f32.cpu", metavar="ID")
    p.add_argument("--case", default="", metavar="NAME", help="which of its timed calls (default: the first)")
    p.add_argument("--seconds", type=_seconds, default=60.0, help="time to spend (default %(default)s)")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected seconds above 0")
    return seconds


def _records(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return count


def _natural(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return count


def _hexadecimal(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{1,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected hexadecimal digits")
    return text


def _settings(p: argparse.ArgumentParser) -> None:
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
