"""FedAvg in pfl-research's own CIFAR-10 setting: this engine against pfl, in one process on one GPU.

    pip install 'pfl[pytorch]==0.6.0'
    python bench/against_pfl.py --data-dir DIR [--rounds 1500] [--their-rounds 60]

1,000 users with 50 images each, independent and alike; 50 users a round; one epoch of SGD in batches of 10 at 0.1; two
convolutions, pooling, two dense layers with dropout before each, Xavier's first weights; the central test images every
ten rounds. Both sides train the same network from data that lies on the card. Medians of ten-round stretches; a whole
run of ours is timed as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.config import load
from fedtailor.data.batches import Split
from fedtailor.data.partition import TRAIN
from fedtailor.engine.jobs import Score
from fedtailor.engine.loop import Federation, State
from fedtailor.nets.base import FixedNet
from fedtailor.registry import register
from fedtailor.runs.execute import prepare
from fedtailor.spaces.layers import Dropout

STRETCH = 10  # rounds between two looks at the test images


class TwoConvolutions(nn.Module):
    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            Dropout(0.5),
        )
        self.head = nn.Linear(128, classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@register("net", "two-convolutions")
@dataclass(frozen=True)
class TwoConvolutionsNet(FixedNet):
    def module(self) -> nn.Module:
        return TwoConvolutions(self.input, self.classes)


@dataclass
class Setting:
    federation: Federation
    state: State
    test: Split  # images that no client has


def setting(data_dir: str, clients: int, rounds: int, precision: str, on: str = "cuda") -> Setting:
    table = {
        "data.name": "cifar10",
        "data.dir": data_dir,
        "clients": clients,
        "participants": 50,
        "rounds": rounds,
        "precision": precision,
        "partition.name": "iid",
        "partition.samples": 50,
        "partition.val": 0.0,
        "partition.test": 0.0,
        "local.epochs": 1.0,
        "local.batch": 10,
        "local.lr": 0.1,
        "local.momentum": 0.0,
        "local.weight_decay": 0.0,
        "local.augment": "none",
        "method.name": "fedavg",
        "net.name": "two-convolutions",
    }
    setup = prepare(load({}, table))
    device = torch.device(on)
    federation, _ = setup.federation(device, 1, "auto", print)
    data = setup.dataset
    taken = np.concatenate([setup.partition.indices(i, TRAIN) for i in range(clients)])
    rest = np.setdiff1d(np.arange(len(data.labels)), taken)[-10_000:]
    images = torch.from_numpy(np.ascontiguousarray(data.images[rest].transpose(0, 3, 1, 2))).to(device)
    labels = torch.from_numpy(data.labels[rest].astype(np.int64)).to(device)
    like = federation.store.split(0, TRAIN)
    return Setting(federation, federation.begin(), Split(images, labels, 0, len(rest), like.mean, like.std))


def stretches(count: int, advance: Callable[[], None], look: Callable[[], float]) -> tuple[list[float], float]:
    """Seconds of every ten rounds with a look at the test images, and the last accuracy."""
    seconds, accuracy = [], float("nan")
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STRETCH):
            advance()
        accuracy = look()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, accuracy


def ours(given: Setting, count: int) -> tuple[list[float], float]:
    federation, state = given.federation, given.state
    rounds: Iterator[State] = federation.rounds(state, lambda _: None)

    async def central() -> float:
        task = federation.method.shared(state.server)
        assert task is not None
        client = federation.client(federation.job.seats[0], {}, state.round)
        return await Score(client.build(task), given.test)

    def look() -> float:
        return federation.engine.run([("central test images", central())])[0]

    return stretches(count, lambda: next(rounds) and None, look)


def theirs(given: Setting, count: int) -> tuple[list[float], float]:
    """The same by pfl: its algorithm, model wrapper, backend and central evaluation."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    job = given.federation.job

    class Net(TwoConvolutions):
        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return F.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
            self.eval()
            return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}

    def pair(split: Split) -> list[Tensor]:
        return list(split.at(torch.arange(split.start, split.start + split.size, device=split.labels.device)))

    users = {i: pair(given.federation.store.split(i, TRAIN)) for i in range(job.clients)}
    data = FederatedDataset.from_slices(users, get_user_sampler("random", list(users)))
    net = Net(job.space.input, job.space.classes)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    central = CentralEvaluationCallback(
        Dataset(tuple(pair(given.test)), eval_kwargs={"eval": True}), NNEvalHyperParams(10_000), frequency=STRETCH
    )
    seconds: list[float] = []
    found: list[float] = []

    class Watch(TrainingProcessCallback):
        began = time.perf_counter()

        def after_central_iteration(self, metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
            if central_iteration % STRETCH == 0:
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - self.began)
                found.extend(float(v.overall_value) for k, v in metrics if "accuracy" in str(k))
                self.began = time.perf_counter()
            return False, Metrics()

    FederatedAveraging().run(
        NNAlgorithmParams(count * STRETCH + 1, 10**6, job.participants, None),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_batch_size=10, local_num_epochs=1, local_learning_rate=0.1),
        callbacks=[central, Watch()],
        send_metrics_to_platform=False,
    )
    return seconds, found[-1] if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--their-rounds", type=int, default=60)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    args = parser.parse_args()
    given = setting(args.data_dir, args.clients, args.rounds, args.precision)
    their_seconds, their_accuracy = theirs(given, args.their_rounds // STRETCH)
    began = time.perf_counter()
    our_seconds, our_accuracy = ours(given, args.rounds // STRETCH)
    whole = time.perf_counter() - began
    a, b = statistics.median(their_seconds[1:]) / STRETCH, statistics.median(our_seconds[1:]) / STRETCH
    row = {
        "workload": "pfl",
        "precision": args.precision,
        "pfl_s": a,
        "ours_s": b,
        "ratio": a / b,
        "whole_run_s": whole,
        "rounds": args.rounds,
        "accuracy": our_accuracy,
        "pfl_rounds": args.their_rounds,
        "pfl_accuracy": their_accuracy,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
