"""``python -m edgeless demo | info | plan | bench``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Optional

# Imported only when chosen: `info` must answer even where the libraries of the others are missing.
COMMANDS = {
    "demo": (
        "edgeless.demo.command",
        "train a network with the stock layers and with edgeless, side by side",
    ),
    "info": ("edgeless.info", "versions, what this build has, what each framework offers"),
    "plan": ("edgeless.cli.plan_command", "which kernels run for an aggregation on a graph of some size, and why"),
    "bench": ("edgeless.bench.command", "time layers or bare aggregation against PyG, torch.compile and DGL"),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a configuration file at its first import
    parser = argparse.ArgumentParser(prog="edgeless", description="Graph layers that never write an edge tensor.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    modules = {}
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=f"edgeless {name}: {help_text}.")
        if argv[:1] == [name]:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(command)
    args = parser.parse_args(argv)
    args.argv = argv

    from edgeless.cli.child import ChildError
    from edgeless.cli.devices import UsageError

    try:
        return modules[args.command].run(args)
    except UsageError as error:
        print(f"edgeless {args.command}: {error}", file=sys.stderr)
        return 2
    except ChildError as error:
        print(f"edgeless {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
