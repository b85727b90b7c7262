"""What a method sees of a client: its data's splits for learning, its memory, and the jobs it can ask for.

The object holds train and val images only; test images are in a store it has no reference to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import Split, Stream, steps_for
from ..errors import UserError
from ..method import Job as RunJob
from ..method import Seat, Task
from ..parts import STATISTICS
from ..seeds import rng_of, seed_of
from ..spaces.base import Space, Weights
from ..spaces.measure import Cost, copies, parameters_of, tensors_of
from .jobs import Fit, Loop, Measured, Predict, Recalibrate, Recipe, Score, Value
from .steps import objective

if TYPE_CHECKING:
    from .local import LocalEngine

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
SCORE_BATCH = 1000


class Client:
    """One client during one round (or one evaluation)."""

    def __init__(
        self,
        job: RunJob,
        seat: Seat,
        train: Split,
        val: Split,
        memory: dict[str, Any],
        round: int,
        engine: LocalEngine,
        keeping: bool = False,
        public: Split | None = None,
    ) -> None:
        self.id, self.name, self.samples = seat.id, seat.name, seat.samples
        self.seat, self.space, self.local = seat, job.space, job.local
        self.round, self.rounds, self.seed, self.keeping = round, job.rounds, job.seed, keeping
        self._kept, self._memory = memory, None  # as it lies; and as the client changes it, once it was looked at
        self.flops = 0  # spent so far
        self._splits = {"train": train, "val": val} | ({} if public is None else {"public": public})
        self._engine = engine
        self._jobs = 0  # numbers this client's jobs, so that each draws its own batches
        self._stream: Stream | None = None  # of the latest fit
        self._few = dict[tuple[str, int], Split]()  # of a split's images, so many
        self.log_prior = self._log_prior(train) if job.local.prior else None

    @property
    def memory(self) -> dict[str, Any]:
        """What the client keeps from round to round. Changes count only when the round is finished."""
        if self._memory is None:
            self._memory = dict(self._engine.fetch(self.id, self._kept))
        return self._memory

    @memory.setter
    def memory(self, changed: dict[str, Any]) -> None:
        self._memory = changed

    # networks ---------------------------------------------------------------------------------------------------

    def build(self, task: Task, space: Space | None = None) -> nn.Module:
        """The network of a task, holding its weights. A network that is no point of the run's space names its own."""
        net = self._engine.network(space or self.space, task.arch)
        self.load(net, task.weights)
        return net

    def load(self, net: nn.Module, weights: Weights) -> None:
        """Copies weights into a network; statistics that did not travel come from the client's memory."""
        tensors, stale = tensors_of(net), False
        there = weights.keys() >= tensors.keys()
        if there and [weights[n].shape for n in tensors] == [t.shape for t in tensors.values()]:
            sources = [weights[n] for n in tensors]
        else:
            found = self._completed(tensors, weights)
            stale = len(found) < len(tensors)
            tensors, sources = {name: tensors[name] for name in found}, list(found.values())
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(list(tensors.values()), sources)
        net.stale = stale or self.local.bn == "recalibrate"  # type: ignore[assignment]

    def _completed(self, tensors: Weights, weights: Weights) -> Weights:
        """The values for a network's tensors. Statistics that nobody knows are set to those of standard images."""
        kept = self.memory.get("statistics", {}) if self.local.bn == "local" else {}
        found: Weights = {}
        for name, tensor in tensors.items():
            source = weights.get(name)
            if source is None and name.endswith(STATISTICS):
                source = kept.get(name)
                if source is None or source.shape != tensor.shape:
                    tensor.fill_(0.0 if name.endswith("running_mean") else 1.0)
                    continue
            elif source is None or source.shape != tensor.shape:
                shape = None if source is None else tuple(source.shape)
                raise UserError(f"'{name}' should have shape {tuple(tensor.shape)}, the weights have {shape}.")
            found[name] = source
        return found

    def take(self, net: nn.Module, only: Callable[[str], bool] | None = None) -> Weights:
        """A copy of the network's tensors, to send or to keep. Statistics leave only under the `average` policy."""
        wanted = {n: t for n, t in tensors_of(net).items() if only is None or only(n)}
        found = self._engine.in_room(lambda: copies(wanted))
        statistics = {n: t for n, t in found.items() if n.endswith(STATISTICS)}
        if self.local.bn == "average" or not statistics:
            return found
        if self.local.bn == "local":
            self.memory["statistics"] = self.memory.get("statistics", {}) | statistics
        return {n: t for n, t in found.items() if n not in statistics}

    def copy(self, net: nn.Module) -> Weights:
        """A copy of all of the network's tensors, statistics too: for the client's own memory, never to be sent."""
        return self._engine.in_room(lambda: copies(tensors_of(net)))

    @property
    def initial(self) -> Weights:
        """The weights that the client's network started from, which every client can make for itself."""
        return self.space.part(self.initial_of(self.space), self.seat.arch)

    def initial_of(self, space: Space) -> Weights:
        """The first weights of another space or net."""
        return self._engine.initial(space, self.seed)

    # jobs -------------------------------------------------------------------------------------------------------

    async def fit(
        self,
        net: nn.Module,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        lr: float | None = None,
        only: Callable[[str], bool] | None = None,
        loss: Loss | None = None,
        pull: tuple[Weights, float] | None = None,
        push: Weights | None = None,
        momentum: bool = True,
        on: str = "train",
        again: bool = False,
    ) -> Measured:
        """Trains the network with the run's local optimiser for so many epochs or steps; returns the mean loss.

        `only` limits training to parameters by name; `pull` = (anchor, strength) adds strength * (w - anchor) to the
        gradient, the gradient of strength/2 * |w - anchor|^2; `push` is added to the gradient as it is. Without
        `momentum` SGD takes plain steps. `on` is train, val, or both as train+val; `again` takes the batches of the fit
        before instead, in the same order.
        """
        train = tuple(n for n in parameters_of(net) if only is None or only(n))
        if not train:
            raise UserError("there is nothing to train: no parameter of this network is selected.")
        if self._stream is None or not again:
            self._stream = Stream(self._split(on), self.local.batch, self.local.augment, self._next_seed(on))
        stream, split = self._stream, self._stream.split
        if steps is None:
            steps = steps_for(split.size, self.local.batch, self.local.epochs if epochs is None else epochs)
        anchor, strength = pull or (None, 0.0)
        await self._settle(net)
        self._spend(net, steps, split)
        return await Fit(
            net,
            train,
            stream,
            steps,
            self.lr if lr is None else lr,
            self.local if momentum else replace(self.local, momentum=0.0),
            loss,
            self.log_prior,
            anchor if strength else None,
            strength,
            push,
            self._next_seed("fit"),
        )

    async def loop(
        self,
        step: Callable[..., Tensor] | Recipe,
        nets: Sequence[nn.Module],
        values: Sequence[Value] = (),
        *,
        epochs: float | None = None,
        steps: int | None = None,
        over: Sequence[str] = ("train",),
        augment: bool = True,
        passes: float = 1.0,
    ) -> Measured:
        """Runs a step of the method's own over batches; with several splits, each call gets one batch of each.

        Images of `public` come without labels: in their place are the images' numbers in the public set. A step may
        also be a recipe, for `nets` and `values`, which a GPU then captures once and not once for every job.

        `passes` says how many ordinary training steps' arithmetic one call costs.
        """
        first = self._split(over[0])
        steps = self.steps(epochs, over[0]) if steps is None else steps
        how = {s: self.local.augment if augment and s != "public" else "none" for s in over}
        streams = tuple(Stream(self._split(s), self.local.batch, how[s], self._next_seed(s)) for s in over)
        for net in nets:
            await self._settle(net)
            self._spend(net, steps, first, passes)
        return await Loop(step, streams, steps, tuple(nets), self._next_seed("loop"), tuple(values))

    async def score(self, net: nn.Module, on: str = "val", images: int = 0, rough: bool = False) -> float:
        """Accuracy of the network as this client would use it.

        With `images` it is that of at most so many images of the split, the same ones at every call of a round. What
        only ranks networks may be `rough`: in bfloat16 where training is.
        """
        await self.refresh(net)
        split = self._some(on, images) if images else self._split(on)
        self.flops += split.size * self.cost(net).flops
        return await Score(net, split, self.shift, rough)

    async def predict(self, net: nn.Module, on: str = "train") -> Tensor:
        """The network's outputs on all images of a split, in their order, as this client would use it."""
        await self.refresh(net)
        split = self._split(on)
        self.flops += split.size * self.cost(net).flops
        return await Predict(net, split)

    def labels(self, on: str = "train") -> Tensor:
        """The labels of a split, in the order of `predict`."""
        split = self._split(on)
        return split.labels[split.start : split.start + split.size]

    async def refresh(self, net: nn.Module) -> None:
        """Re-estimates normalisation statistics where they are missing or the policy asks for it."""
        if getattr(net, "stale", False) and any(n.endswith(STATISTICS) for n in tensors_of(net)):
            stream = Stream(self._splits["train"], self.local.batch, "none", self._next_seed("recalibrate"))
            await Recalibrate(net, stream, self.local.bn_batches)
        net.stale = False  # type: ignore[assignment]

    # the local objective ----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """This round's learning rate; that of the time after the rounds, which a schedule must not starve, where a
        network is trained for keeps or the client joins when all is over."""
        over = self.keeping or self.round > self.rounds
        return self.local.lr_for_keeps if over else self.local.lr_at(self.round, self.rounds)

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, *more: Any) -> Tensor:
        """The client's objective on a batch, for steps of a method's own; `more` is handed to the network."""
        return objective(net(x, *more), y, self.local.label_smoothing, self.log_prior)

    @property
    def shift(self) -> Tensor | None:
        """What is added to the logits when the client uses a network: tau times its log prior."""
        return None if self.log_prior is None else self.local.prior_tau * self.log_prior

    def _log_prior(self, train: Split) -> Tensor:
        smoothing = self.local.prior_smoothing
        counts = train.label_counts(self.space.classes) + smoothing
        return torch.from_numpy(np.log(counts / counts.sum())).to(train.mean)

    # facts ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def captures(self) -> bool:
        """Whether the engine captures steps and passes to repeat them: what has one structure for all cases is fast."""
        return self._engine.captures

    def size(self, split: str) -> int:
        return self._split(split).size

    def steps(self, epochs: float | None = None, on: str = "train") -> int:
        """How many batches a job of this many epochs sees; None: the run's local epochs."""
        return steps_for(self.size(on), self.local.batch, self.local.epochs if epochs is None else epochs)

    @property
    def owned(self) -> Tensor:
        """Which classes the client has training images of."""
        return torch.from_numpy(self._splits["train"].label_counts(self.space.classes) > 0).to(self._engine.device)

    def fits(self, arch: tuple[int, ...]) -> bool:
        """Whether the client's hard budget admits the arch."""
        return self.seat.fits(arch)

    def cost(self, net: nn.Module) -> Cost:
        """Cost of a network that was built for this client."""
        found = getattr(net, "cost", None)
        return found if isinstance(found, Cost) else net.space.cost(net.arch)  # type: ignore

    def rng(self, purpose: str) -> np.random.Generator:
        return rng_of(self.seed, purpose, self.round, self.id)

    def _split(self, name: str) -> Split:
        if name != "train+val":
            return self._splits[name]
        train, val = self._splits["train"], self._splits["val"]  # side by side in the store
        if val.start != train.start + train.size:
            raise ValueError("train and val of this store do not lie side by side: they cannot be joined")
        return replace(train, size=train.size + val.size)

    def _some(self, name: str, images: int) -> Split:
        split = self._split(name)
        if images >= split.size:
            return split
        if (name, images) not in self._few:
            picked = np.sort(self.rng("some").choice(split.size, images, replace=False)) + split.start
            at = torch.from_numpy(picked).to(split.labels.device)
            few = replace(split, images=split.images[at], labels=split.labels[at], start=0, size=images)
            self._few[name, images] = few
        return self._few[name, images]

    async def _settle(self, net: nn.Module) -> None:
        """Gives a network that is trained for keeps statistics to start from, where it has none: from 0 and 1 they need
        dozens of batches to come right, and the few steps that a network is given may be over by then."""
        if self.keeping and self.local.bn != "recalibrate":
            await self.refresh(net)

    def _spend(self, net: nn.Module, steps: int, split: Split, passes: float = 1.0) -> None:
        net.stale = self.local.bn == "recalibrate"  # type: ignore[assignment]
        self.flops += int(steps * min(split.size, self.local.batch) * self.cost(net).train_flops * passes)

    def _next_seed(self, purpose: str) -> int:
        self._jobs += 1
        return seed_of(self.seed, purpose, self.round, self.id, self._jobs)
