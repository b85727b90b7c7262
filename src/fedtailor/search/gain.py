"""What an architecture of one's own is worth: SPIDER's personalisation gain (section 5.2.2, eq. 6) of a finished run.

Every client's network is tuned on every other client's data. With p_ij the accuracy on client i of architecture j,
g_i = sum over j != i of (p_ii - p_ij) / (c - 1) is how much client i's own serves it better than the others' do.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..config import load as load_config
from ..engine.client import Client
from ..errors import UserError
from ..evaluate import test_accuracy
from ..method import Task
from ..runs.execute import choose_device, prepare, read_networks
from ..runs.facts import read_facts

Start = Literal["own", "fresh"]


@dataclass(frozen=True)
class Gain:
    """The matrix P = (p_ij) on test, and what follows from it."""

    names: tuple[str, ...]
    accuracy: np.ndarray  # [client i, architecture j]

    @property
    def differences(self) -> np.ndarray:
        """p_ii - p_ij: what client i loses with architecture j."""
        return np.diag(self.accuracy)[:, None] - self.accuracy

    @property
    def gains(self) -> np.ndarray:
        """g_i of eq. 6; the term j = i is zero."""
        return self.differences.sum(1) / (len(self.names) - 1)

    @property
    def mean(self) -> float:
        return float(self.gains.mean())

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["client", "architecture_of", "test_accuracy", "own_minus_this"])
            for i, client in enumerate(self.names):
                for j, owner in enumerate(self.names):
                    rows.writerow([client, owner, self.accuracy[i, j], self.differences[i, j]])


def gain_matrix(
    run: Path,
    epochs: int = 30,
    lr: float = 0.0,
    start: Start = "own",
    clients: Sequence[int] = (),
    device: str = "auto",
    workers: int = 0,
    say: Callable[[str], None] | None = None,
) -> Gain:
    """Tunes the network of each of the `clients` (none given: all that trained) on the data of each of them.

    `start` is where tuning starts: "own" is the network as its client keeps it, weights and all, as in the paper;
    "fresh" its architecture with new weights, so that columns differ in the architecture alone. The epoch is chosen on
    val, the paper's is the best on test.
    """
    if read_facts(run)["status"] != "done":
        raise UserError(f"{run} is not finished, its networks are not there yet: fedtailor resume {run}")
    setup = prepare(load_config(run / "config.toml"), run / "partition.npz")
    job = setup.job
    kept = {i: net for i, net in read_networks(run, job.space).items() if i < job.clients}
    chosen = list(clients) or list(kept)
    unknown = [i for i in chosen if i not in kept]
    if unknown or len(chosen) < 2:
        raise UserError(f"a gain matrix needs two clients or more out of 0 to {len(kept) - 1}, not {chosen}.")
    lr = lr or (job.local.lr if start == "fresh" else job.local.lr / 10)
    federation, test = setup.federation(choose_device(device), workers)
    member = {i: federation.client(job.seats[i], {}, job.rounds + 1) for i in chosen}

    async def tune(i: int, j: int) -> float:
        client = federation.client(job.seats[i], {}, job.rounds + 1)  # same batches for every architecture
        space, arch, weights = kept[j]
        if start == "fresh":
            weights = space.cut(space.new_weights(job.seed, "gain"), arch)
        net = client.build(Task(weights, arch), space)
        if start == "own" and member[j].shift is not None:
            _unfold(net, member[j])
        await _tune(net, client, epochs, lr)
        return await test_accuracy(client, net, test)

    accuracy = np.zeros((len(chosen), len(chosen)))
    try:
        for row, i in enumerate(chosen):
            accuracy[row] = federation.engine.run(
                [
                    (f"architecture of client {job.seats[j].name} on client {job.seats[i].name}", tune(i, j))
                    for j in chosen
                ]
            )
            if say:
                say(f"{job.seats[i].name}: own {accuracy[row, row]:.4f}, others {_others(accuracy[row], row):.4f}")
    finally:
        federation.engine.close()
    return Gain(tuple(job.seats[i].name for i in chosen), accuracy)


async def _tune(net: nn.Module, client: Client, epochs: int, lr: float) -> None:
    """Trains for so many epochs and leaves the network as it was after the one that was best on val."""
    best, weights = -1.0, {}
    for _ in range(epochs):
        await client.fit(net, epochs=1, lr=lr)
        found = await client.score(net)
        if found > best:
            best, weights = found, client.copy(net)
    if epochs:
        client.load(net, weights)


def _unfold(net: nn.Module, owner: Client) -> None:
    """Takes its owner's label prior out of a kept network again; the client that tunes it adds its own."""
    assert isinstance(net.head, nn.Linear)
    assert owner.shift is not None
    with torch.no_grad():
        net.head.bias.sub_(owner.shift)


def _others(row: np.ndarray, own: int) -> float:
    return float(np.delete(row, own).mean())


def heat_map(gain: Gain) -> str:
    """P and the gains as two heat maps, SVG (figure 3 of the paper)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a heat map needs matplotlib, which is not installed: pip install 'fedtailor[report]'"
        ) from None
    import io

    n = len(gain.names)
    names = [name if len(name) < 15 else name[:14] + "…" for name in gain.names]
    reach = max(1e-9, float(np.nanmax(np.abs(gain.differences))), float(np.nanmax(np.abs(gain.gains))))
    panels = (
        (gain.accuracy, names, "test accuracy of architecture j on client i, %", "Blues", None, None),
        (
            np.column_stack([gain.differences, gain.gains]),
            [*names, "gain"],
            f"own minus this, percentage points; mean gain {100 * gain.mean:+.2f}",
            "RdBu",
            -reach,
            reach,
        ),
    )
    side = max(3.2, 0.52 * n + 1.2)
    style: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9, "svg.hashsalt": "gain"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(2 * side + 1.6, side + 0.5), layout="constrained", facecolor="white")
        for axes, (values, columns, title, colours, low, high) in zip(figure.subplots(1, 2), panels, strict=True):
            axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
            axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor")
            axes.set_yticks(range(n), names)
            axes.set_xlabel("architecture of")
            axes.set_ylabel("client")
            axes.set_title(title, fontsize=9)
            if n <= 20:
                shades = axes.images[0].norm(values)
                for i, j in np.ndindex(values.shape):
                    dark = shades[i, j] > 0.6 if colours == "Blues" else abs(shades[i, j] - 0.5) > 0.33
                    axes.text(j, i, f"{100 * values[i, j]:.1f}", ha="center", va="center", color="w" if dark else "k")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
