"""Measure what a pruned network weighs and how long it runs, before and after `compact`, in torch and ONNX Runtime.

    python benchmarks/deployment.py --out FOLDER                           # the recorded networks, on this CPU
    python benchmarks/deployment.py --train FOLDER --networks FOLDER       # train them anew first; needs the data sets
    python benchmarks/deployment.py --prepare FOLDER                       # for another machine: no extras needed there
    python benchmarks/deployment.py --models FOLDER --device cuda --out FOLDER

The networks: LeNet-300-100 and LeNet-5-Caffe on MNIST with 1% of their weights, the paper's CIFAR-10 network with 2% of
its dense layer's, and an encoder of four blocks with 70% of its heads and hidden units switched off. Beside
LeNet-300-100 stands Torch-Pruning's magnitude pruner at equal test error, and the same network with gates by input.

The versions of a network take turns within each round. A latency is that of one call whose result is waited for: the
median over the rounds. How many times faster it is than the dense network is the median of the rounds' ratios, with a
95% interval by order statistics.
"""

from __future__ import annotations

import gzip
import io
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deployment_networks import BUILD, GROUPS, INPUTS, TORCH_PRUNING, Trained, build, family, read, share_of
from deployment_timing import Call, Latency, Session, eager, graphs, in_turns, provider_for
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.compaction.chains import LAYERS
from dropconnectpp.compaction.costs import cost, counted
from dropconnectpp.compaction.structure import describe, rebuild
from dropconnectpp.compaction.tracing import count_positions
from dropconnectpp.errors import ArgumentError

RECORDED = Path(__file__).parents[1] / "records" / "deployment"
DENSE, PRUNED, COMPACT, BY_GROUPS, RIVAL = "dense", "pruned", "compact", "gates by input, compact", "Torch-Pruning"
ALL_INPUTS = "compact, all inputs"


@dataclass(frozen=True)
class Settings:
    """One run of this benchmark."""

    networks: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    threads: int


@dataclass(frozen=True)
class Facts:
    """What does not depend on the machine."""

    network: str
    label: str
    made: str
    error: float | None
    kept: float
    """Share of the weights of the dense network."""
    parameters: int
    flops: int
    saved: int
    """Bytes of the file that `save` writes."""
    exported: int
    """Bytes of the ONNX file."""
    difference: float | None
    """Largest difference from the pruned network's outputs."""


@dataclass(frozen=True)
class Version:
    """One form of a network, ready to run."""

    facts: Facts
    model: nn.Module
    onnx: bytes
    units: list[int]

    def write(self, path: Path) -> None:
        """As plain data: tensors, numbers and words."""
        content = {
            "facts": asdict(self.facts),
            "units": self.units,
            "structure": describe(self.model),
            "state": self.model.state_dict(),
            "onnx": torch.tensor(bytearray(self.onnx), dtype=torch.uint8),
        }
        with gzip.open(path, "wb", compresslevel=6) as file:  # most of a pruned network is zeros
            torch.save(content, file)  # type: ignore[arg-type]


def read_version(path: Path) -> Version:
    """What `Version.write` wrote."""
    content = torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)
    facts = Facts(**content["facts"])
    model = build(facts.network, content["units"])
    if content["structure"] is not None:
        model = rebuild(model, content["structure"])
    model.load_state_dict(content["state"])
    return Version(facts, model.eval(), content["onnx"].numpy().tobytes(), content["units"])


# ------------------------------------------------------------------------------------------------ preparing


def example(network: str, batch: int, device: torch.device | None = None) -> Tensor:
    """Random inputs: latency does not depend on what an image shows."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, *INPUTS[family(network)], generator=generator).to(device or torch.device("cpu"))


@torch.no_grad()
def prepare(folder: Path, network: str) -> list[Version]:
    """All versions of a network; none where its files are missing."""
    trained = read(folder, network)
    if trained is None:
        return []
    x = example(network, 128)
    weights = sum(w.numel() for w in build(network, []).parameters() if w.ndim > 1)
    small = dcpp.compact(trained.model, x[:2])
    whole = build(network, [])
    found = [
        _version(trained, DENSE, trained.model, weights, like=whole, error=trained.dense_error, kept=1.0),
        _version(trained, PRUNED, trained.model, weights),
        _version(trained, COMPACT, small, weights, reference=trained.model(x)),
    ]
    wide = dcpp.compact(trained.model, x[:2], select_inputs=False)
    if small.compaction.parameters != wide.compaction.parameters:  # type: ignore[union-attr]
        found.append(_version(trained, ALL_INPUTS, wide, weights, reference=trained.model(x)))
    groups, rival = read(folder, network + GROUPS), read(folder, network + TORCH_PRUNING)
    if groups is not None:
        thin = dcpp.compact(groups.model, x[:2])
        found.append(_version(groups, BY_GROUPS, thin, weights, reference=groups.model(x)))
    if rival is not None:
        found.append(_version(rival, RIVAL, rival.model, weights))
    return found


def _version(
    trained: Trained,
    label: str,
    model: nn.Module,
    weights: int,
    *,
    like: nn.Module | None = None,
    reference: Tensor | None = None,
    error: float | None = None,
    kept: float | None = None,
) -> Version:
    network = family(trained.name)
    x = example(network, 128)
    with tempfile.TemporaryDirectory() as name:
        saved, exported = Path(name) / "m.safetensors", Path(name) / "m.onnx"
        dcpp.save(like or model, saved)
        dcpp.to_onnx(model, exported, x[:2])
        bytes_saved, onnx = saved.stat().st_size, exported.read_bytes()
    difference = None if reference is None else float((model(x) - reference).abs().max())
    compaction: Any = getattr(model, "compaction", None)
    facts = Facts(
        network=network,
        label=label,
        made=trained.made,
        error=trained.error if error is None and kept is None else error,
        kept=share_of(model) * _size(model) / weights if kept is None else kept,
        parameters=sum(p.numel() for p in model.parameters()),
        flops=flops_of(model, x[:1]) if compaction is None else compaction.flops[1],
        saved=bytes_saved,
        exported=len(onnx),
        difference=difference,
    )
    return Version(facts, model, b"" if label == PRUNED else onnx, trained.units)  # it runs as the dense one


def _size(model: nn.Module) -> int:
    return sum(w.numel() for w in model.parameters() if w.ndim > 1)


def flops_of(model: nn.Module, x: Tensor) -> int:
    """Of the layers, for one example, a multiplication and an addition counted as two."""
    positions = count_positions(model, ((x,), {}), (*LAYERS, nn.MultiheadAttention))
    costs = {name: cost(module) for name, module in counted(model).items()}
    return sum(positions[name] * one.each + positions[name] ** 2 * one.pairs for name, one in costs.items())


# ------------------------------------------------------------------------------------------------ measuring


def size_rows(versions: list[Version]) -> list[list[Cell]]:
    """One row a version."""
    first = versions[0].facts
    rows: list[list[Cell]] = []
    for version in versions:
        facts = version.facts
        rows.append(
            [
                facts.network,
                facts.label,
                facts.error,
                f"{facts.kept:.2%}",
                f"{facts.parameters:,}",
                f"{facts.flops:,}",
                f"{facts.saved:,}",
                first.saved / facts.saved,
                f"{facts.exported:,}",
                first.exported / facts.exported,
                _exponent(facts.difference),
            ]
        )
    return rows


SIZES = [
    *("network", "version", "error, %", "weights kept", "parameters", "FLOPs"),
    *("file, bytes", "times smaller", "ONNX, bytes", "times smaller", "outputs differ by"),
]


def times_rows(versions: list[Version], batch: int, device: torch.device, settings: Settings) -> list[list[Cell]]:
    """One row a version that runs in another way than the dense one."""
    run = [version for version in versions if version.facts.label != PRUNED]
    x = example(run[0].facts.network, batch, device)
    models = [version.model.to(device) for version in run]
    labels = [version.facts.label for version in run]
    if device.type == "cpu":
        rows = sparse_rows(models, labels, batch)
        models, labels = [*models, *rows.values()], [*labels, *rows]
    in_torch = eager(models, x, settings.rounds)
    outputs = _outputs(models, x)
    differ = [
        _largest(outputs[0], output) if label.startswith(COMPACT) else None
        for output, label in zip(outputs, labels, strict=True)
    ]
    columns: list[list[Latency | None]] = [list(in_torch)]
    if device.type == "cuda":
        with torch.inference_mode():
            columns.append(graphs(models, x, settings.rounds))
    in_onnx: list[float | None] = [None] * len(models)
    sessions = _sessions(run, device, settings)
    if sessions:
        values = x.cpu().numpy()
        in_onnx[: len(run)] = [
            _largest(torch.from_numpy(s(values)), o) for s, o in zip(sessions, outputs, strict=False)
        ]
        calls: list[Call] = [lambda session=session: session(values) for session in sessions]  # type: ignore[misc]
        columns.append([*in_turns(calls, settings.rounds), *[None] * (len(models) - len(run))])
    return [
        [
            *(run[0].facts.network, label, batch),
            *(cell for column in columns for cell in _cells(column, i)),
            *(_exponent(differ[i]), _exponent(in_onnx[i])),
        ]
        for i, label in enumerate(labels)
    ]


@torch.inference_mode()
def _outputs(models: list[nn.Module], x: Tensor) -> list[Tensor]:
    """In full float32: on a GPU torch times convolutions with TF32, whose rounding would hide what differs."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return [model(x).cpu() for model in models]
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _exponent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def sparse_rows(models: list[nn.Module], labels: list[str], batch: int) -> dict[str, nn.Module]:
    """The compact network with sparse rows, where `to_sparse` finds that they pay for so many rows."""
    found: dict[str, nn.Module] = {}
    for model, label in zip(models, labels, strict=True):
        if label != COMPACT:
            continue
        try:
            found[f"{label}, sparse rows"] = dcpp.to_sparse(model, rows=batch)
        except ArgumentError:
            continue  # it says so where no layer would be faster
    return found


def _sessions(run: list[Version], device: torch.device, settings: Settings) -> list[Session]:
    provider = provider_for(device)
    return [] if provider is None else [Session(version.onnx, settings.threads, provider) for version in run]


def _cells(column: list[Latency | None], place: int) -> list[Cell]:
    """Milliseconds, and how many times faster than the first."""
    mine, first = column[place], column[0]
    if mine is None:
        return [None, "-"]
    if first is None or place == 0:
        return [1e3 * mine.median, "-"]
    ratio, low, high = mine.times_faster(first)
    return [1e3 * mine.median, f"{ratio:.2f} [{low:.2f}, {high:.2f}]"]


def times_columns(device: torch.device) -> list[str]:
    """What the columns of the second table hold."""
    ways = ["torch", *(["CUDA graph"] if device.type == "cuda" else [])]
    ways += ["ONNX Runtime"] if provider_for(device) is not None else []
    timed = [name for way in ways for name in (f"{way}, ms", f"{way}: times faster")]
    return ["network", "version", "batch", *timed, "differs from the pruned", "ONNX differs from torch"]


def measure(groups: list[list[Version]], device: torch.device, settings: Settings, out: Path | None) -> None:
    """Both tables, printed and written."""
    report = Report("Deployment: bytes and latency before and after compact", device, settings)
    made = {f"{v.facts.network}, {v.facts.label}": v.facts.made for group in groups for v in group}
    ways = "; ".join(f"{name}: {how}" for name, how in made.items() if not name.endswith((DENSE, PRUNED)))
    report.add(
        Table(
            "What it weighs",
            SIZES,
            [row for group in groups for row in size_rows(group)],
            f"Pruned is the network with zeros in place, compact the same with fewer units; it runs as the dense one. "
            f"FLOPs are for one example. How each was made: {ways}.",
        )
    )
    rows = [row for group in groups for batch in settings.batches for row in times_rows(group, batch, device, settings)]
    report.add(
        Table(
            "How long it runs",
            times_columns(device),
            rows,
            f"Milliseconds of one call, median of {settings.rounds} rounds; times faster than dense with "
            f"{'a 95% interval' if settings.rounds >= 6 else 'the range'}. Differences are the largest among all "
            f"outputs. {settings.threads} threads on the CPU. "
            f"{_runtime(device)}",
        )
    )
    if out is None or (out.suffix and not out.is_dir()):
        report.write(out)
    else:
        out.mkdir(parents=True, exist_ok=True)
        report.write(out / f"deployment_{device.type}.md")
        report.write(out / f"deployment_{device.type}.json")


def _runtime(device: torch.device) -> str:
    provider = provider_for(device)
    if provider is None:
        return f"ONNX Runtime was not measured: it has no provider for {device.type} here."
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}, {provider}; its times include copies of inputs and outputs."


def main() -> None:
    """Train, prepare or measure."""
    made = parser(__doc__)
    made.add_argument("--networks", type=Path, default=RECORDED, help="folder of trained networks")
    made.add_argument("--only", nargs="+", choices=list(BUILD), default=list(BUILD), help="these networks alone")
    made.add_argument("--train", type=Path, help="first train the networks that are missing in this folder")
    made.add_argument("--epochs", nargs=3, type=int, default=(30, 10, 2), help="of the three trained networks")
    made.add_argument("--prepare", type=Path, help="write all versions into this folder, and measure nothing")
    made.add_argument("--models", type=Path, help="measure what --prepare wrote")
    made.add_argument("--batches", nargs="+", type=int, default=(1, 128), help="rows of an input")
    made.add_argument("--rounds", type=int, default=15, help="measurements of each call, in turn")
    made.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    given = made.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.train is not None:
        import deployment_training

        deployment_training.train(given.train, tuple(given.epochs), given.only)
    if given.models is not None:
        files = sorted(given.models.glob("*.pt.gz"))
        read_back = [read_version(file) for file in files]
        groups = [[v for v in read_back if v.facts.network == name] for name in given.only]
    else:
        groups = [prepare(given.networks, name) for name in given.only]
    groups = [group for group in groups if group]
    if not groups:
        made.error("there is no network: give --networks or --models a folder that has some, or --train")
    if given.prepare is not None:
        given.prepare.mkdir(parents=True, exist_ok=True)
        for group in groups:
            for place, version in enumerate(group):
                version.write(given.prepare / f"{version.facts.network}-{place}.pt.gz")
        return
    settings = Settings(tuple(given.only), tuple(given.batches), given.rounds, torch.get_num_threads())
    measure(groups, torch.device(given.device), settings, given.out)


if __name__ == "__main__":
    main()
