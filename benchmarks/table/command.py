"""The whole table of figures on this machine, ours beside a peer's: one command.

    python -m benchmarks.table --out results.jsonl                     all that fits these GPUs
    python -m benchmarks.table --out results.jsonl --peer vllm         and vLLM, on the same cases
    python -m benchmarks.table --out results.jsonl --only churn --seconds 540
    python -m benchmarks.table --print results.jsonl --chart figures.png
    python -m benchmarks.table --shape tiny --device cpu --dtype float32 --only one-gpu

For each group it writes the model and adapters where they are missing, starts a server, plays the
cases, ends the server, and looks whether the GPU's memory is free again. Each case is a line of the
results file at once; the same command again goes on with what is not in it. Groups: one-gpu,
two-gpus, seventy-b (four GPUs), churn, churn-all-resident, open-loop, fairness, kinds, experts (of
shapes with routed experts), structured, start; with --peer also peer, peer-two-gpus, peer-churn,
peer-seventy-b, peer-open-loop: the same cases by another server.
"""

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.stored import STORED
from benchmarks.table.chart import NothingToDraw, draw
from benchmarks.table.groups import FULL, SMALL, RowGroup, groups
from benchmarks.table.page import line_of, page
from benchmarks.table.play import PEER_OF, Budget, Peer, Player, Session, plan, unmeasured
from benchmarks.table.rows import Results, ResultsError, gpus, is_good, machine, read_rows
from benchmarks.table.setup import HOST, ITEM_BYTES, PEERS, SetupError, setup_of
from benchmarks.workload import SHAPES


def selected_names(parsed: argparse.Namespace, known: dict[str, RowGroup]) -> list[str]:
    """The groups to be played; SetupError for one that this machine is too small for."""
    has = len(gpus()) if parsed.device == "cuda" else max(group.gpus for group in known.values())
    if not has:
        raise SetupError(
            "no GPU is here (nvidia-smi finds none): to try the table on a CPU, add "
            "--shape tiny --device cpu --dtype float32"
        )
    if parsed.only:
        names = list(parsed.only)
    else:
        names = list(known) + (list(PEER_OF) if parsed.peer else [])
        names = [name for name in names if known[PEER_OF.get(name, name)].gpus <= has]
        names = [name for name in names if is_for(known[PEER_OF.get(name, name)], parsed.shape)]
    for name in names:
        group = known[PEER_OF.get(name, name)]
        if not is_for(group, parsed.shape):
            raise SetupError(f"{name} needs a --shape with routed experts")
        if group.gpus > has:
            raise SetupError(f"{name} needs {group.gpus} GPUs, this machine has {has}")
        if name in PEER_OF and not parsed.peer:
            raise SetupError(f"{name} needs --peer: {', '.join(PEERS)}, or a command")
    return names


def is_for(group: RowGroup, shape: str) -> bool:
    """Whether a shape has what the group's adapters are of."""
    return group.expert_pages is None or "num_experts" in SHAPES[shape]


def peer_of(parsed: argparse.Namespace) -> Peer | None:
    """The peer's commands: by a known name, or as given."""
    if parsed.peer is None:
        return None
    if parsed.peer in PEERS:
        base, adapters = PEERS[parsed.peer]
        prefix = f"env {parsed.peer_env} " if parsed.peer_env else ""
        return Peer(prefix + (parsed.peer_base or base), prefix + adapters)
    return Peer(parsed.peer_base or parsed.peer, parsed.peer)


def check_port(port: int) -> None:
    """SetupError when the port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as fault:
            raise SetupError(f"port {port} is taken: name a free one with --port") from fault


def sessions_of(parsed: argparse.Namespace, results: Results) -> list[Session]:
    """What is to be played now; SetupError where nothing can be."""
    known = groups(SMALL if parsed.shape == "tiny" else FULL)
    sessions = plan(known, selected_names(parsed, known), parsed.cases or (), peer_of(parsed))
    if not sessions:
        raise SetupError("no case has such a name: --plan lists them")
    return sessions if parsed.again else unmeasured(sessions, results, setup_of(parsed))


def show(sessions: Sequence[Session]) -> None:
    """Print what would be played, and about how long it takes on an H200."""
    for session in sessions:
        seconds = sum(play.seconds for play in session.plays)
        names = " ".join(play.name for play in session.plays)
        print(f"{session.group.name} ({session.side}): about {seconds:.0f} s beside the start")
        print(f"    {names}")


def measure(parsed: argparse.Namespace) -> bool:
    """Play what is to be played; rows are in the file whatever happens. False if any failed."""
    results = Results(parsed.out)
    sessions = sessions_of(parsed, results)
    if parsed.plan:
        show(sessions)
        return True
    setup = setup_of(parsed)
    check_port(setup.port)
    budget = Budget(parsed.seconds)
    log = lambda line: print(line, flush=True)  # noqa: E731
    player = Player(setup, results, budget, machine(), log, line_of)
    known = len(results.rows)
    for session in sessions:
        player.run(session)
    return all(is_good(row) for row in results.rows[known:])


def report(parsed: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Print the tables, and draw them if requested."""
    rows = read_rows(paths)
    print(f"\n{page(rows)}")
    if parsed.chart is not None:
        draw(rows, parsed.chart)


def leave(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that a server is not left behind."""
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*groups(FULL), *PEER_OF]
    made.add_argument("--out", type=Path, default=Path("results.jsonl"), help="the results file")
    made.add_argument("--print", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    made.add_argument("--chart", type=Path, help="draw the figures as a PNG here")
    made.add_argument("--plan", action="store_true", help="only say what would be played")
    made.add_argument("--only", nargs="+", choices=names, metavar="GROUP", help=" ".join(names))
    made.add_argument("--cases", nargs="+", metavar="GLOB", help="such as 'lora*' or '*-c64'")
    made.add_argument("--seconds", type=float, help="start no case that would end later")
    made.add_argument("--again", action="store_true", help="play what the file holds already, too")
    made.add_argument("--work", type=Path, default=Path("/tmp/loray-table"), help="for models")
    made.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    made.add_argument("--layers", type=int, help="of the checkpoint that `start` loads")
    made.add_argument("--stored", choices=STORED, help="let random weights be quantised so")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--set", action="append", metavar="KEY=VALUE", help="of our server's args")
    peers = f"{', '.join(PEERS)}, or a command; see docs/performance/measure.md"
    made.add_argument("--peer", help=peers)
    made.add_argument("--peer-base", help="its command for base rows, if that is another")
    made.add_argument("--peer-env", help="NAME=VALUE ... for a peer that is known by name")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; exit code 1 if a case failed, 2 for what cannot be measured here."""
    parsed = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, leave)
    try:
        if parsed.print:
            report(parsed, parsed.print)
            return
        has_all = measure(parsed)
        if not parsed.plan and parsed.out.exists():
            report(parsed, [parsed.out])
        sys.exit(0 if has_all else 1)
    except (SetupError, ResultsError, NothingToDraw, FileNotFoundError) as fault:
        print(fault, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command again goes on", file=sys.stderr)
        sys.exit(130)
