"""`python -m bench`: runs the groups that are asked for and prints what came out."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from bench import peers
from bench.table import Table, render
from gpulet.errors import GpuletError
from gpulet.sim import isolation

GROUPS = {
    "create": "create through each runtime, over bare runc",
    "engine": "starting a container in a real containerd, over a plain one",
    "throughput": "110 containers one after another and 8 at a time",
    "passthrough": "state, kill and delete through the runtime",
    "prefer": "preferred allocations: GPUs by size, against exhaustive search",
    "rpc": "the device plugin's answers, start and memory",
    "cli": "container CLI and hook: info, list, configure",
    "health": "from an Xid to Unhealthy in the kubelet's stream",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. Returns 0, 1 where a group could not run, 2 for a wrong command line."""
    options = _options(argv)
    try:
        named = peers.from_environ(os.environ)
        why_not = isolation.enter("runc")
        if why_not:
            raise GpuletError(why_not)
        tables = run(options.groups, named, options.rounds)
    except GpuletError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps([table.to_data() for table in tables], indent=2))
    else:
        render(tables, Console(width=None if sys.stdout.isatty() else 140))
    return 0


def run(groups: Sequence[str], named: peers.Peers, rounds: int | None) -> list[Table]:
    """The tables of these groups; each group's module has `run` and its usual number of rounds, `ROUNDS`."""
    tables = []
    progress = Console(stderr=True, quiet=not sys.stderr.isatty())
    for group in groups:
        module = importlib.import_module(f"bench.{group}")
        with progress.status(group) as status:
            say = lambda text, group=group: status.update(f"{group}: {text}")  # noqa: E731
            tables += module.run(named, rounds or module.ROUNDS, say)
    return tables


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    text = "\n".join(f"  {name:12} {what}" for name, what in GROUPS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Benchmarks: everything is compared within one run, in turns; medians and spread.",
        epilog=f"groups:\n{text}\n\npeers are named by PEER_RUNTIME, PEER_CTK, PEER_CDI_HOOK, PEER_HOOK, "
        "PEER_CONTAINER_CLI\nand PEER_DEVICE_PLUGIN; none is needed",
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="one or more groups, or all (the default)")
    parser.add_argument("--rounds", type=int, help="how often, instead of each group's usual number")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    options = parser.parse_args(argv)
    unknown = [name for name in options.groups if name not in (*GROUPS, "all")]
    if unknown or (options.rounds is not None and options.rounds < 1):
        parser.error(f"unknown group: {unknown[0]}" if unknown else "--rounds: at least 1")
    if not options.groups or "all" in options.groups:
        options.groups = list(GROUPS)
    return options


if __name__ == "__main__":
    sys.exit(main())
