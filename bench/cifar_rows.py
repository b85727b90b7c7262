"""The rows of the CIFAR-10 tables: what each federation compares, and the papers' figures beside it.

A row is trained once. Its endings are made of the trained state afterwards: as it is, fine-tuned, with the label prior.
An ending `name@x` is one of several values tried; of these the one with the best val accuracy is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from authors.deals import fedrep, per_fedavg, pfedhn

from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import Partition

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Ending:
    """What clients do with the trained state before they are scored."""

    changes: Changes = field(default_factory=dict)
    epochs: float = 0.0  # that every client trains its network on for


@dataclass(frozen=True)
class Row:
    changes: Changes
    endings: Mapping[str, Ending]
    rates: tuple[float, ...] = (0.02, 0.05, 0.08, 0.12)  # learning rates tried
    paper: Mapping[str, str] = field(default_factory=dict)  # ending -> the paper's figure
    hours: str = ""  # the paper's, for the row
    note: str = ""
    judged: bool = True  # on test, at the end
    seeds: int = 1  # that the table wants: 0, 1, ...
    preset: str = ""  # instead of the federation's
    partition: str = ""  # the hash it must have, where it is not the federation's
    deal: Callable[[Dataset, int], Partition] | None = None  # of the images, where no rule of the package does it


@dataclass(frozen=True)
class Federation:
    preset: str
    partition: str  # the hash it must have
    rows: Mapping[str, Row]
    title: str = ""
    precision: str = "tf32"  # that all its rows compute in, unless somebody asks for another


def tuned(epochs: float, lr: float, **more: Any) -> Ending:
    """Fine-tuning: some epochs at one rate, of whatever the method gives a client."""
    return Ending({"local.schedule": "constant", "local.lr": lr, **_dotted(more)}, epochs)


def _dotted(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in options.items()}


PRIOR = {"local.prior": True, "local.prior_tau": 1.0}
HALF = {"method.name": "fedavg-ft", "method.epochs": 5.0, "method.lr": 0.001, "method.interpolate": 0.5}


def shared_endings(epochs: float, **as_is: Any) -> dict[str, Ending]:
    """For methods that give a client a network others have trained too."""
    rates = (0.0003, 0.001, 0.003)
    return {
        "as it is": Ending(_dotted(as_is)),
        "prior": Ending({**_dotted(as_is), **PRIOR}),
        **{f"fine-tuned@{lr}": tuned(epochs, lr, **as_is) for lr in rates},
        **{f"fine-tuned, prior@{lr}": tuned(epochs, lr, **as_is, local__prior=True) for lr in rates[:2]},
    }


def prior_endings(epochs: float, **as_is: Any) -> dict[str, Ending]:
    """For rows that were trained with the prior in every client's loss."""
    return {
        "as it is": Ending(_dotted(as_is)),
        **{f"fine-tuned@{lr}": tuned(epochs, lr, **as_is) for lr in (0.0003, 0.001)},
    }


def own_endings(epochs: float, rates: tuple[float, ...] = (0.0003, 0.001)) -> dict[str, Ending]:
    """For methods whose clients have networks of their own."""
    return {"as it is": Ending(), **{f"fine-tuned@{lr}": tuned(epochs, lr) for lr in rates}}


OWN = {"own statistics": Ending({"local.bn": "recalibrate"})}  # as search methods' clients have them
FRESH = OWN | {"own statistics, prior": Ending({"local.bn": "recalibrate", **PRIOR})}  # instead of those kept since
HALF_WAY = {"half-way, prior": Ending({**HALF, "local.prior": True, "local.prior_tau": 0.5})}
HALF_WAY_PRIOR = {"half-way": Ending({**HALF, "local.prior": True})}

# devices ------------------------------------------------------------------------------------------------------------

NO_PRIOR = {"local.prior": False}
SEARCH = {"local.bn": "recalibrate", "method.deploy": "as-is"}
ADAMW_RATES = (0.0003, 0.0005, 0.001, 0.002)


def search(method: str, space: str, **more: Any) -> dict[str, Any]:
    return {"method.name": method, "space.name": space, **NO_PRIOR, **SEARCH, **_dotted(more)}


DEVICES = {
    "local": Row(
        {"method.name": "local", "participants": 100, "rounds": 10, **NO_PRIOR},
        {"as it is": Ending(), "prior": Ending(PRIOR)},
        paper={"as it is": "57.60 ± 13.60"},
        note="50 epochs a client; there is nothing to wait for, so all train at once",
    ),
    "fedavg": Row(
        {"method.name": "fedavg", **NO_PRIOR},
        shared_endings(10.0) | HALF_WAY,
        paper={"fine-tuned": "74.44"},
        seeds=2,
    ),
    "fedavg-prior": Row({"method.name": "fedavg", "local.prior": True}, prior_endings(10.0) | HALF_WAY_PRIOR),
    "fedrep": Row(
        {"method.name": "fedrep", "method.final_epochs": 0.0, **NO_PRIOR},
        {"as it is": Ending({"method.final_epochs": 10.0}), "prior": Ending({"method.final_epochs": 10.0, **PRIOR})},
        paper={"as it is": "74.75"},
    ),
    "fedbabu": Row(
        {"method.name": "fedbabu", "method.epochs": 0.0, **NO_PRIOR},
        {f"fine-tuned@{lr}": Ending({"method.epochs": 10.0, "method.lr": lr}) for lr in (0.001, 0.003, 0.01)},
        paper={"fine-tuned": "75.00"},
    ),
    "perfedrlnas-mobilenetv3": Row(
        search("perfedrlnas", "mobilenetv3"),
        shared_endings(10.0),
        paper={"fine-tuned": "82.02 ± 4.85"},
        hours="9.96",
        note="32 pixels instead of 224; the paper scores after 5 local epochs, the best of all rounds",
        seeds=2,
    ),
    "perfedrlnas-darts": Row(
        search("perfedrlnas", "darts", space__variant="full", space__channels=16, space__cells=8),
        shared_endings(10.0),
        paper={"fine-tuned": "80.80 ± 5.48"},
        hours="5.76",
    ),
    "perfedrlnas-vit": Row(
        search("perfedrlnas", "vit", local__optimizer="adamw", local__weight_decay=0.05),
        shared_endings(10.0),
        rates=ADAMW_RATES,
        paper={"fine-tuned": "85.02 ± 4.11"},
        hours="28.14",
        note="AdamW, as the authors; 32 pixels instead of 192 to 288",
    ),
    "random-arch": Row(search("random-arch", "mobilenetv3"), shared_endings(10.0)),
    "largest-fit": Row(search("largest-fit", "mobilenetv3"), shared_endings(10.0)),
}

# silos --------------------------------------------------------------------------------------------------------------

SILO_RATES = (0.01, 0.03, 0.06, 0.1)
SHORT = "the paper has 1000 rounds"
# In its last phase the paper's SPIDER trains on val too, and so do its baselines all the time. Here all rows train on
# the same images, and val chooses their rates and endings.
APART = {"method.merge_val": False}
SILOS = {
    "fedavg": Row(
        {"method.name": "fedavg"},
        shared_endings(5.0) | HALF_WAY | OWN,
        SILO_RATES,
        {"fine-tuned": "90.39"},
        note=f"local adaptation; {SHORT}",
        seeds=2,
    ),
    "fedavg-prior": Row({"method.name": "fedavg", **PRIOR}, prior_endings(5.0) | HALF_WAY_PRIOR, SILO_RATES),
    "ditto": Row(
        {"method.name": "ditto", "method.lamda": 0.1},
        own_endings(5.0),
        SILO_RATES,
        {"as it is": "88.91"},
        note=SHORT,
        seeds=2,
    ),
    "fednas-personal": Row(
        {
            "method.name": "fednas-personal",
            "space.variant": "full",
            "space.channels": 8,
            "rounds": 50,
            "local.batch": 64,
        },
        {"as it is": Ending()},
        (0.01, 0.025, 0.05, 0.1),
        note="8 channels instead of 16; 50 rounds and batches of 64, as in the paper's global search",
    ),
    "spider": Row(
        {"method.name": "spider", "method.lamda": 0.01, **APART},
        own_endings(5.0, (0.001,)),
        (0.01, 0.02, 0.03, 0.06),
        {"as it is": "94.55"},
        hours="15 (CIFAR-100)",
        note=f"{SHORT}, and trains on val too; phases scaled to the run",
        seeds=2,
    ),
    "spider-local": Row(
        {"method.name": "spider", "method.lamda": 0.0, **APART},
        own_endings(5.0, (0.001,)),
        (0.01, 0.02, 0.03, 0.06),
        note=f"lambda = 0; {SHORT}, and trains on val too; phases scaled to the run",
    ),
}

# budgets ------------------------------------------------------------------------------------------------------------

BUDGETS = {
    "fedavg-x0.5": Row(
        {"method.name": "fedavg-uniform", "local.bn": "average"},
        shared_endings(5.0) | OWN,
        paper={"as it is": "89.49"},
        note="one network of half the width for everybody",
    ),
    "fedavg-x0.5-prior": Row({"method.name": "fedavg-uniform", "local.bn": "average", **PRIOR}, prior_endings(5.0)),
    "feduniform": Row(
        {"method.name": "feduniform"},
        shared_endings(5.0) | FRESH,
        paper={"as it is": "92.52", "global": "92.47"},
        seeds=2,
    ),
    "fedcs": Row(
        {"method.name": "fedcs", "method.inherit": False, "rounds": 214},
        shared_endings(5.0) | FRESH,
        paper={"as it is": "93.29", "global": "93.08"},
        note="sub-networks trained from scratch, as in the paper's Table 1: 150 rounds after 64 of warm-up",
        seeds=2,
    ),
    "fedcs-inherit": Row(
        {"method.name": "fedcs", "method.inherit": True},
        shared_endings(5.0) | FRESH,
        note="sub-networks start from the warmed-up supernet; 45 of the rounds are warm-up",
    ),
}

# the authors' own settings ------------------------------------------------------------------------------------------

QUOTED = "figure, network and deal of images not yet checked against the source"
COPIED = "network and settings as in public copies of the authors' code, but exactly so many classes; figure unchecked"
TWO, FIVE = (
    "071ce83c705d7b348b76cd0eed0afc7a0a19627a2ff5849115e034fe3f783b3c",
    "a80eb7e5a8ed7d43f0bb7782be0d5e4becf3a5a42f630f3b3aa0098918de74b8",
)
FIVE_CLASSES = {"partition.classes": 5, "method.head_epochs": 10.0, "method.body_epochs": 5.0, "local.epochs": 15.0}
AUTHORS = {
    "fedrep-2": Row(
        {},
        {"as it is": Ending()},
        (0.003, 0.01, 0.03, 0.1),
        {"as it is": "87.70"},
        note=f"two classes a client; Table 1; the paper means over the last ten rounds; {COPIED}",
    ),
    "fedrep-5": Row(
        FIVE_CLASSES,
        {"as it is": Ending()},
        (0.003, 0.01, 0.03, 0.1),
        {"as it is": "75.68"},
        note=f"five classes a client; Table 1; {COPIED}",
        partition=FIVE,
    ),
    "fedbabu-2": Row(
        {"method.epochs": 0.0},
        {
            f"fine-tuned@{lr}": Ending({"method.epochs": 5.0, "method.lr": lr, "local.schedule": "constant"})
            for lr in (0.003, 0.01, 0.03, 0.1)
        },
        (0.03, 0.1, 0.2, 0.3),
        {"fine-tuned": "not known; Flower's reproduction: 70.5, best round 85.5"},
        note="two classes a client, four-layer network, as in the paper's Table 13",
        preset="bench/authors/fedbabu.toml",
    ),
    "fedavg-2": Row(
        {"method.name": "fedavg", "local.epochs": 1.0},
        shared_endings(10.0),
        (0.003, 0.01, 0.03, 0.1),
        {"as it is": "42.65", "fine-tuned": "87.65"},
        note=f"two classes a client, the comparison in FedRep's Table 1; {COPIED}",
    ),
    "local-2": Row(
        {"method.name": "local", "participants": 100, "rounds": 10, "local.epochs": 10.0},
        {"as it is": Ending()},
        (0.003, 0.01, 0.03, 0.1),
        {"as it is": "89.79"},
        note=f"two classes a client, the comparison in FedRep's Table 1; {COPIED}",
    ),
    "per-fedavg-hf": Row(
        {},
        {"as it is": Ending()},
        (0.0003, 0.001, 0.003, 0.01),
        {"as it is": "50.44"},
        note=f"Table 1, tau = 10, alpha = 0.001; {QUOTED}",
        preset="bench/authors/per-fedavg.toml",
        partition="56d3b68d67d5d9b04624e1828b7ff1665cb5d011391a0f55ca95449c6d26862d",
        deal=per_fedavg,
    ),
    "pfedhn": Row(
        {},
        {"as it is": Ending()},
        (0.0025, 0.005, 0.01, 0.02),
        {"as it is": "88.38 ± 0.29"},
        note="50 clients; the paper takes the round that is best on val; Flower's reproduction has 82.37",
        preset="bench/authors/pfedhn.toml",
        partition="4b7cb885625f1bb7b20336dc252f4fcfe5b7fc0f8ad327a3ebd4bea50fb8d561",
        deal=pfedhn,
    ),
}
AUTHORS["pfedhn-pc"] = replace(
    AUTHORS["pfedhn"],
    changes={"method.head": "private", "method.lr": 0.05},
    paper={"as it is": "90.08 ± 0.63"},
    note="private heads; 50 clients; the paper takes the round that is best on val; Flower's reproduction has 85.25",
)
AUTHORS["per-fedavg-fo"] = replace(
    AUTHORS["per-fedavg-hf"], changes={"method.variant": "fo"}, paper={"as it is": "46.98"}
)
# FedRep's comparison again, as its public code deals images: some clients get one class twice. The rate is the one that
# the rows with exactly two classes chose; new beside the deal is FedAvg's ending that tunes the head alone, as there.
HEAD_ONLY = {"method.name": "fedavg-ft", "method.part": "head", "method.epochs": 10.0}
SHARDS: dict[str, Any] = {
    "partition": "f65f9dcdd75a514fd1888f1122c0a1f5ec9eb163bcde29e1dabb72f1953471f7",
    "deal": fedrep,
    "rates": (0.03,),
}
for name in ("fedrep-2", "fedavg-2", "local-2"):
    note = "two shards a client, as in the authors' code: 7 of 100 clients draw one class twice"
    AUTHORS[f"{name}-shards"] = replace(AUTHORS[name], note=note, **SHARDS)
AUTHORS["fedavg-2-shards"] = replace(
    AUTHORS["fedavg-2-shards"],
    endings=shared_endings(10.0) | {f"head tuned@{lr}": Ending({**HEAD_ONLY, "method.lr": lr}) for lr in (0.001, 0.01)},
    paper={"as it is": "42.65", "head tuned": "87.65"},
)

FEDERATIONS = {
    "devices": Federation(
        "devices",
        "aced681b45ba1672623cd95d8f158a8d0840dc8e8dc413ea53f4aefe3242d03d",
        DEVICES,
        "100 clients with 400 training images each, Dirichlet 0.3 per client, 5 a round, 5 epochs of batch 32",
    ),
    "silos": Federation(
        "silos",
        "cf5f105875e427749e5289046e78566286c2c847bdf7d8bd5bb20dfaab4ca2c6",
        SILOS,
        "8 silos, Dirichlet 0.2 per class on the 50,000 training images, split 60/20/20, all in every round",
        "bf16",
    ),
    "budgets": Federation(
        "budgets",
        "1973a1a8b523ae3040804040a2228fdb118f4cca145e539161d1c4f9418372f9",
        BUDGETS,
        "20 clients, Dirichlet 0.5 per class, 10 a round, HIGH fleet: half afford MobileNetV2, 30 % x.75, 20 % x.5",
        "bf16",
    ),
    "authors": Federation(
        "bench/authors/fedrep.toml",
        TWO,
        AUTHORS,
        "Methods in their authors' own small settings, as far as they are known; see bench/authors",
    ),
}
