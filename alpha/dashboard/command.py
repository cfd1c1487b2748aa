"""`alpha dashboard`: serve the page until Ctrl-C. Floor 8."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

from alpha.dashboard.folder import Folder
from alpha.errors import InputError, MachineError
from alpha.files import path_argument

HOST, PORT = "127.0.0.1", 8765
PACKAGES = ("starlette", "uvicorn", "plotly", "pandas")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("runs", type=path_argument, metavar="RUNS_DIR", nargs="?", default="runs",
                        help="folder of run directories, or one run (default: runs)")
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST}, this machine only)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on, 0 for any free one (default: {PORT})")


def run(args: argparse.Namespace) -> int:
    """The command."""
    return serve(Path(args.runs), args.host, args.port)


def needs() -> None:
    """MachineError unless the packages of the extra are there."""
    missing = [p for p in PACKAGES if importlib.util.find_spec(p) is None]
    if missing:
        raise MachineError("the dashboard needs packages that are not installed", came=f"without {', '.join(missing)}",
                           expected="the extra `dashboard`",
                           do=f"in the checkout: {sys.executable} -m pip install --editable '.[dashboard]'")  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. InputError for an impossible address or port, MachineError if it is taken or not ours."""
    if not 0 <= port <= 65535:
        raise InputError("no such port", came=port, expected="0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError("no such address to listen on", came=f"{host}: {error}", expected="an address of this machine") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise MachineError("the dashboard cannot listen there", came=f"{host}:{port}: {os.strerror(error.errno or 0)}",
                           expected="a free port of this machine", do="give another one, such as --port 0 (any free one)") from error
    return listener


def application(runs: Path, host: str) -> Any:
    """The ASGI application for `host`."""
    needs()
    from alpha.dashboard.app import build
    from alpha.train.catalogue import catalogue

    hosts = frozenset({"127.0.0.1", "localhost", "[::1]", host.lower(), f"[{host.lower()}]"}) if is_loopback(host) else None
    return build(Folder(runs), catalogue, hosts=hosts)


def serve(runs: Path, host: str = HOST, port: int = PORT) -> int:
    """Serve until interrupted; returns 0."""
    app = application(runs, host)
    import uvicorn

    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        if not is_loopback(host):
            print(f"warning: anyone who can reach {host}:{port} can read the runs in {runs}; there is no password and no encryption",
                  file=sys.stderr)
        if not runs.exists():
            print(f"note: {runs} does not exist yet; the page shows runs as soon as there are some", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        print(f"profiling at http://{shown}:{port}/profiling   gates at http://{shown}:{port}/gates   Ctrl-C ends", flush=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=2,
                                               server_header=False))  # fmt: skip
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass
    return 0
