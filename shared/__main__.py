"""``python -m edgeless demo | info | plan | compile | reorder | tune | bench``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Optional

# A command's module is imported only when chosen: `info` must work where libraries of other commands are missing.
COMMANDS = {
    "demo": (
        "edgeless.tools.demo.command",
        "train a network with the stock layers and with edgeless, side by side",
    ),
    "info": ("edgeless.tools.cli.info_command", "versions, kernels and their compiler, what each framework offers"),
    "plan": (
        "edgeless.tools.cli.plan_command",
        "which kernels run for an aggregation on a graph of some size, and why",
    ),
    "compile": ("edgeless.tools.cli.compile_command", "compile CUDA kernels ahead of their first launch, into a pack"),
    "reorder": ("edgeless.tools.bench.reorder", "what other orders of a graph's nodes cost, and what they are worth"),
    "tune": (
        "edgeless.tools.cli.tune_command",
        "which engine is the fastest for sums over a graph; auto takes it then",
    ),
    "bench": ("edgeless.tools.bench.command", "time layers or bare aggregation against PyG, torch.compile and DGL"),
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage text, which is in --help."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # else demo's --data would mean --dataset

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns the exit status: 2 for a request that cannot be met, 1 for a failure."""
    # Imported here, since processes that a command spawns import this module again, and since no module of the runtime
    # may import the tools.
    from edgeless.tools.cli.child import ChildError
    from edgeless.tools.cli.devices import UsageError
    from edgeless.tools.cli.files import OutputError
    from edgeless.tools.cli.process import PIPE_CLOSED, Terminated, discard_output, print_anything, signals_raise

    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a configuration file at its first import
    print_anything()
    prog = " ".join(["edgeless", *(argv[:1] if argv and argv[0] in COMMANDS else ())])
    try:
        with signals_raise():
            try:
                return _run(argv)
            finally:
                sys.stdout.flush()  # here, where a closed pipe or a full disk can still be reported
    except UsageError as error:
        return _complain(prog, error, 2)
    except (ChildError, OutputError) as error:
        return _complain(prog, error, 1)
    except BrokenPipeError:
        discard_output()
        return PIPE_CLOSED
    except OSError as error:
        discard_output()
        return _complain(prog, error, 1)
    except KeyboardInterrupt:
        return 130
    except Terminated as end:
        return end.status


def _run(argv: list[str]) -> int:
    parser = Parser(prog="edgeless", description="Graph layers that never write an edge tensor.")
    version = importlib.import_module("edgeless").__version__
    parser.add_argument("--version", action="version", version=f"edgeless {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    modules = {}
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=f"edgeless {name}: {help_text}.")
        if argv[:1] == [name]:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(command)
    args = parser.parse_args(argv)
    args.argv = argv
    return modules[args.command].run(args)


def _complain(prog: str, error: Exception, status: int) -> int:
    print(f"{prog}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
