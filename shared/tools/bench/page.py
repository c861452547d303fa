"""``python -m edgeless.tools.bench.page [docs]`` writes docs/performance.md, the other pages of figures and pictures.

They are generated from docs/runs. Every figure is the median of one run, from the file that the command shown with it
wrote. A section without a run names the command that measures it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from edgeless.files.whole_files import whole_file

from . import ddp, generated, page_tables, picture, scaleout, shapes, training_page
from .runs import DEMO, Suite, read
from .suites import SUITES

WIDTH = 150  # characters of a line of text

WRITTEN = (
    "<!-- Written by `python -m edgeless.tools.bench.page` from the files in docs/runs: change those, "
    "not this page. -->"
)
HEAD = f"""\
# Performance

{WRITTEN}

Every figure is the median of one run, whose date, machine and command stand above its table. *Stock* is the framework's
own layer; *compiled* is that under torch.compile. Peers run in one process, in turns, and share inputs; peaks are above
the inputs, on the CPU in a process for each peer, and count what is kept of a graph. A *twin* is a synthetic graph with
the counts and the degree skew of a public one (`shared/tools/bench/twins.py`); Cora and tolokers are real. `DIR` is a
folder with `tolokers.npz` and PyG's raw Cora files. Why kernels are as they are stands in
[decisions](decisions/README.md).
"""


@dataclass(frozen=True)
class Section:
    """One table of the page.

    Attributes:
        suite: a suite of the bench command, or :data:`DEMO`.
        heading, text: heading and text above the table.
        table: returns the table's columns and rows.
    """

    suite: str
    heading: str
    text: str
    table: Callable[[Suite], tuple[Sequence[str], list[list[str]]]]

    @property
    def command(self) -> str:
        """The command that measures the run."""
        if self.suite == DEMO:
            return f"python -m edgeless demo --threads 2 --json docs/runs/{DEMO}.json"
        return f"python -m edgeless bench --suite {self.suite} --data DIR --json docs/runs/{self.suite}.json"


def page(suites: dict[str, Suite]) -> str:
    """The whole page, without sections that have neither a run nor a command that measures one."""
    shown = [section for section in SECTIONS if section.suite in {*suites, *SUITES, DEMO}]
    return "\n".join([HEAD, *("\n".join(_section(section, suites.get(section.suite))) for section in shown)])


def engines_page(suites: dict[str, Suite]) -> str:
    """The page with the table of engines, to which docs/choosing.md refers."""
    body = "\n".join(_section(ENGINES, suites.get(ENGINES.suite))).removeprefix(f"## {ENGINES.heading}\n")
    return f"# {ENGINES.heading}\n\n{WRITTEN}\n\n{body}"


def parts_page(suites: dict[str, Suite]) -> str:
    """The page with the figures of several GPUs, to which docs/scale-out.md refers."""
    body = "\n".join("\n".join(_section(section, suites.get(section.suite))) for section in PARTS)
    return f"# Figures of two GPUs\n\n{WRITTEN}\n\n{body}"


def steps_page(suites: dict[str, Suite]) -> str:
    """The page with the figures of training on small graphs, of the suites that have a run."""
    body = "\n".join("\n".join(_section(part, suites[part.suite])) for part in SMALL_GRAPHS if part.suite in suites)
    return f"# Figures of small graphs\n\n{WRITTEN}\n\n{body}"


def _section(section: Section, suite: Optional[Suite]) -> list[str]:
    lines = [f"## {section.heading}"]
    if suite is None:
        return [*lines, f"No run is committed yet; this makes one: `{section.command}`", ""]
    columns, rows = section.table(suite)
    marks = ["---", *["---:"] * (len(columns) - 1)]
    lines += textwrap.wrap(section.text, WIDTH, break_on_hyphens=False)
    lines += [*(f"- {describe(setting)}" for setting in suite.settings), ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (columns, marks, *rows)]
    return [*lines, ""]


def describe(setting: dict) -> str:
    """One line on a run: date, machine, versions and command."""
    if setting["gpus"]:
        count = "one" if setting["gpus"] == 1 else setting["gpus"]
        machine = f"{count} {setting['device']}, CUDA {setting['cuda']}"
    else:
        machine = f"{setting['cpu']}, {setting['cores']} cores; {setting['device']}"
    versions = [f"edgeless {setting['edgeless']}" + (f" ({setting['commit']})" if setting["commit"] else "")]
    names = {"torch": "torch", "torch_geometric": "PyG", "dgl": "DGL"}
    versions += [f"{name} {setting[package]}" for package, name in names.items() if setting.get(package)]
    return f"{setting['date']}, {machine}; {', '.join(versions)}: `{setting['command']}`"


_GENERATED = (
    "How many times as long the faster of PyG and PyG compiled takes, forward / forward + backward, and how many times "
    "as large the lesser of their peaks is: geometric means of each kind of message, in brackets the layer that gains "
    "least with its backward"
)

SECTIONS = (
    Section(
        DEMO,
        "Training two layers",
        "Each side in a process of its own; same seed, graph and parameters.",
        page_tables.demo,
    ),
    Section(
        "cpu",
        "CPU: whole layers",
        "Forward + backward, ms and peak memory; 128 features in, 4 heads of 32. In brackets: how many times as long "
        "as edgeless in the same framework. DGL's column of TransformerConv is DotGatConv: one projection, not four.",
        page_tables.cpu_layers,
    ),
    Section(
        "cpu-sums",
        "CPU: sums and maxima",
        "Forward + backward of edgeless in PyG, ms and peak; below, how many times as long take PyG, PyG compiled, PyG "
        "on a sparse matrix (the faster of torch.sparse and SparseTensor), and DGL against edgeless in DGL "
        '(SAGEConv(pool) for max, GraphConv(norm="none") for GraphConv).',
        page_tables.cpu_sums,
    ),
    Section(
        "relations",
        "CPU: layers over relations",
        "Forward, below forward + backward, ms and peak memory; 64 features in, 64 out, one head. In brackets: how "
        "many times as long as edgeless in the same framework, or why a layer was left out. DGL is given sorted edges "
        "and is told so; DGL's column of RGCNConv is RelGraphConv, and it has no RGAT.",
        page_tables.relations,
    ),
    Section(
        "generator-cpu",
        "CPU: messages that are generated",
        f"{_GENERATED}; below, ms of each layer with its own ratios.",
        generated.table,
    ),
    Section(
        "minibatch",
        "CPU: mini-batches",
        "Two layers, 128 -> 128 -> 40, 1,024 seeds with 15 and then 10 neighbours: a new graph at every step, which is "
        "forward, backward and Adam.",
        page_tables.minibatch,
    ),
    Section(
        "molecules",
        "CPU: batches of small graphs",
        "Three layers, 64 -> 64, on a batch of 1 / 8 / 32 / 64 molecules of 15 to 29 atoms, one thread; a step "
        "brings a new graph. How many times as long stock takes as edgeless in the same framework; DGL has no RGAT.",
        page_tables.new_graphs,
    ),
    Section(
        "threads",
        "CPU: threads",
        "Bare attention, ms with 1 / 2 threads; star is one hub with a million in-edges.",
        page_tables.threads,
    ),
    Section(
        "h200",
        "H200: bare attention",
        "Forward, ms (times faster than the fastest published kernel of `shared/tools/bench/h200_peers.json`, share of "
        "the plan's roofline); below, forward + backward and its peak.",
        page_tables.aggregation,
    ),
    Section(
        "h200-sums",
        "H200: sums and minima",
        'Rows of 512 numbers, as above. "none" adds, "both" weighs by degrees; a minimum\'s gradient goes to one edge.',
        page_tables.aggregation,
    ),
    Section(
        "h200-layers",
        "H200: whole layers",
        "Forward + backward, ms and peak (times faster than the fastest of PyG and PyG compiled in that run and of "
        "`shared/tools/bench/h200_peers.json`, and the same of the step replayed from a CUDA graph); float32, below "
        "bfloat16 autocast.",
        page_tables.gpu_layers,
    ),
    Section(
        "h200-relations",
        "H200: layers over relations",
        "64 features in, 64 out, one head; ms called eagerly / replayed from a CUDA graph (times that the replay is "
        "faster than the fastest of PyG in that run and of `shared/tools/bench/h200_relations_peers.json`) and peak; "
        "forward, below forward + backward. bf16: features and parameters.",
        page_tables.gpu_relations,
    ),
    Section(
        "h200-molecules",
        "H200: batches of small graphs",
        "As on the CPU, with the time from a step's begin until the GPU is done.",
        page_tables.new_graphs,
    ),
    Section(
        "generator",
        "H200: messages that are generated",
        f"{_GENERATED}. Behind a semicolon the same of ours replayed from a CUDA graph. GINEConv's and GENConv's edges "
        "have as many features as nodes; bf16: rows of 16 bits under autocast.",
        generated.table,
    ),
    Section(
        "shapes",
        "H200: shapes",
        "Heads from 1 to 16, widths from 4 to 512: the worst time per byte against the best shape of at least as many "
        "bytes a row; below, with the backward.",
        shapes.worst_of_each_case,
    ),
)


ENGINES = Section(
    "engines",
    "Engines on an H200",
    "Forward + backward on synthetic replicas, shuffled / in community order. A cell names the fastest engine of "
    'rowsplit (edge-balanced CSR), wsb (weighted sparse blocks) and cuSPARSE, and the time of `"auto"`\'s choice over '
    "the fastest engine's. Where both are the same engine, the ratio is the noise between two runs.",
    page_tables.chosen_engines,
)

PARTS = (
    Section(
        "h200-scale-out",
        "Two H200: full batches on parts",
        "Epochs of three layers 128-128-128-40 with Adam, on one GPU and on two, whose nodes are partitioned at "
        "random: half of all neighbours are remote. Ms (times as fast as one GPU) by each carrier of halo rows; "
        "torch.sparse is SAGE in plain torch on the same parts; a rank's peak over one GPU's (all-to-all, symmetric); "
        "error of the gradients, relative to those of one GPU.",
        scaleout.page_table,
    ),
    Section(
        "ddp",
        "Two H200: mini-batches",
        "Two layers; the ms of a step alone and together with the other process, and the fraction of its speed that it "
        "keeps, by what averages gradients; seeds are those of a process, with 15 and 10 neighbours.",
        ddp.page_table,
    ),
)


_PEERS = (
    "Milliseconds of a step with loss, backward and Adam, in brackets how many times as long PyG takes. Compiled: "
    "torch.compile; captured: `edgeless.capture_step`. Memory: the captured step's peak over PyG's"
)

SMALL_GRAPHS = (
    Section(
        "small-molecules",
        "Batches of molecules",
        f"Four layers with batch norms and pooling; every step has a new batch. {_PEERS}. A cell: of a batch that is "
        "on the GPU / with the loader, padding and copies.",
        training_page.molecules,
    ),
    Section(
        "small",
        "One small graph",
        f"Two layers with dropout; every step has the same graph. {_PEERS}.",
        training_page.one_graph,
    ),
)


def write(docs: Path) -> None:
    """Writes the pages and the pictures."""
    for name, text in files(docs / "runs").items():
        with whole_file(docs / name) as file:
            file.write_text(text)


def files(runs: Path) -> dict[str, str]:
    """Name below docs/ -> contents of the file."""
    suites = read(runs)
    return {
        "performance.md": page(suites),
        "engines.md": engines_page(suites),
        "scale-out-figures.md": parts_page(suites),
        **(
            {"small-graphs-figures.md": steps_page(suites)}
            if any(part.suite in suites for part in SMALL_GRAPHS)
            else {}
        ),
        **picture.files(suites),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
