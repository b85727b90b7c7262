"""The configuration of a run: typed, strict, from a preset or a TOML file with dotted changes on top."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from .errors import UserError, nearest, unknown
from .options import AtLeastOne, Count, Fraction, NonNegative, Positive, read, table_of

if TYPE_CHECKING:
    import torch

    from .data.partition import PartitionConfig
    from .data.pixels import Reading
    from .fleet.fleet import FleetConfig
    from .method import Method
    from .spaces.base import Space

FORMAT = 1  # of the configuration and the run folder
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Local:
    """[local]: what a client does with a training job. Every method uses the same."""

    epochs: Positive = 1.0
    batch: AtLeastOne = 32
    lr: Positive = 0.05
    schedule: Literal["constant", "cosine"] = "constant"  # of the learning rate over the rounds; cosine ends near 0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 5e-4
    clip: NonNegative = 0.0  # largest gradient norm; 0 = no limit
    label_smoothing: Fraction = 0.0
    augment: Literal["none", "crop", "crop-flip", "crop-flip-cutout"] = "none"
    bn: Literal["average", "local", "recalibrate"] = "average"  # what happens to batch-norm statistics
    bn_batches: AtLeastOne = 10  # batches for re-estimating them
    prior: bool = False  # add the log of the client's label frequencies to the logits inside its loss
    prior_tau: NonNegative = 1.0  # share of it that is folded into the personal network
    prior_smoothing: Positive = 1.0  # pseudo-count per class

    def lr_at(self, round: int, rounds: int) -> float:
        """The learning rate of a round, counted from 1."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(round - 1, rounds) / rounds))

    @property
    def lr_for_keeps(self) -> float:
        """The learning rate after the rounds: a schedule that ends near 0 leaves a tenth for it."""
        return self.lr if self.schedule == "constant" else self.lr / 10

    def optimiser(self, parameters: Sequence[torch.nn.Parameter], lr: float | torch.Tensor) -> torch.optim.Optimizer:
        """A fresh optimiser: its state does not outlive the job. On a GPU it is one fused, capturable kernel."""
        import torch

        cuda = parameters[0].is_cuda
        if self.optimizer == "adamw":
            made = torch.optim.AdamW(parameters, weight_decay=self.weight_decay, fused=cuda, capturable=cuda)
        else:
            how = {"fused": True} if cuda else {"foreach": True}
            made = torch.optim.SGD(parameters, momentum=self.momentum, weight_decay=self.weight_decay, **how)
            if cuda and self.momentum:  # the fused kernel wants all momenta to be there, also of weights not yet used
                for p in parameters:
                    made.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for group in made.param_groups:
            group["lr"] = lr  # given at once, a rate on the card would be read back to see whether it is negative
        return made


@dataclass(frozen=True)
class Data:
    """[data]: which images."""

    name: str = "digits"
    dir: str = ""  # folder that holds them; default: the environment variable FEDTAILOR_DATA
    size: Count = 0  # pixels that pictures are made high and wide; 0: as they are, all of one size
    fit: Literal["crop", "squash", "pad"] = "crop"  # what happens to pictures of other proportions
    colour: Literal["auto", "grey", "colour"] = "auto"  # auto: grey where all pictures are
    broken: Literal["stop", "skip"] = "stop"  # what to do about pictures that cannot be read

    @property
    def reading(self) -> Reading:
        """How picture files are read."""
        from .data.pixels import Reading

        return Reading(self.size, self.fit, self.colour, self.broken)


@dataclass(frozen=True)
class Public:
    """[public]: unlabelled images that everybody may read, for methods that compare predictions on them."""

    name: str = ""  # a data set, as in data.name; or "rest": the run's images that the partition deals to nobody
    images: Count = 0  # take so many of them, drawn at random; 0: all


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's numbers."""

    format: int = FORMAT
    seed: Count = 0
    clients: AtLeastOne = 10
    participants: AtLeastOne = 5
    rounds: AtLeastOne = 10
    evaluate_every: Count = 0  # rounds between evaluations on val; 0 = about ten times in the run
    checkpoint_every: Count = 0  # rounds between checkpoints; 0 = about ten times in the run
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # of training; fp32 is the reference
    archs: str = ""  # given to the clients: "widest", "random" or a run's folder; "": the [net], or what a search finds
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    space: dict[str, Any] = field(default_factory=dict)
    net: dict[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    public: Public = field(default_factory=Public)
    partition: dict[str, Any] = field(default_factory=dict)
    local: Local = field(default_factory=Local)
    fleet: dict[str, Any] = field(default_factory=dict)

    # parts ------------------------------------------------------------------------------------------------------

    def make_method(self) -> Method:
        return read(_method_class(self.method), _rest(self.method), "method")

    def make_space(self, shape: tuple[int, int, int], classes: int) -> Space:
        """The search space, or the fixed network as the space with one point."""
        from .nets.base import OwnNet
        from .registry import lookup
        from .spaces.base import Space

        kind, table = ("space", self.space) if self.space else ("net", self.net)
        found = lookup(kind, _name(table, kind))
        given = {"input": shape, "classes": classes}
        if isinstance(found, type) and issubclass(found, Space):
            if not found.__module__.startswith("fedtailor."):
                found.called = str(table["name"])  # a user's own is found again by its file
            return read(found, _rest(table), kind, given)
        if _rest(table):
            raise UserError(f"[{kind}] '{table['name']}' is your own callable and takes no options from the config.")
        own = dataclasses.make_dataclass("Own", [], bases=(OwnNet,), frozen=True)
        own.name = str(table["name"])  # type: ignore[attr-defined]
        return own(**given, make=found)

    def make_partition(self) -> PartitionConfig:
        from .data.partition import PartitionConfig

        return read(PartitionConfig, self.partition, "partition")

    def make_fleet(self) -> FleetConfig:
        from .fleet.fleet import FleetConfig

        return read(FleetConfig, self.fleet, "fleet")

    def _network_options(self, kind: str) -> dict[str, Any]:
        from .registry import lookup
        from .spaces.base import Space

        table = getattr(self, kind)
        found = lookup(kind, _name(table, kind))
        if not (isinstance(found, type) and issubclass(found, Space)):
            return table
        return {"name": table["name"], **table_of(self.make_space((1, 8, 8), 2), hidden=("input", "classes"))}

    # text -------------------------------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """The resolved configuration: every option with its value."""
        top = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tables = {
            **{kind: self._network_options(kind) for kind in ("space", "net") if getattr(self, kind)},
            "method": {"name": self.method["name"], **table_of(self.make_method())},
            "data": table_of(self.data),
            "public": table_of(self.public) if self.public.name else {},
            "partition": table_of(self.make_partition()),
            "local": table_of(self.local),
            "fleet": table_of(self.make_fleet()),
        }
        top = {k: v for k, v in {**top, **tables}.items() if v != {}}
        return tomli_w.dumps(top)


def load(source: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """A config from a preset's name, a TOML file or a table, with dotted changes such as `local.lr=0.1`."""
    table = dict(source) if isinstance(source, Mapping) else _read_toml(source)
    pairs = list(changes.items()) if isinstance(changes, Mapping) else [_pair(text) for text in changes]
    for named in (True, False):  # names first: another method drops the old one's options, and may use another net
        for key, value in pairs:
            if key.endswith(".name") == named:
                table = _changed(table, key.split("."), value, key)
        for kind in ("space", "net"):
            table = _one_of(table, kind)
    return resolve(from_table(table))


def change(table: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The table with one `key=value` applied; keys may be dotted, values are TOML or plain words."""
    key, value = _pair(text)
    return _changed(table, key.split("."), value, key)


def from_table(table: Mapping[str, Any]) -> Config:
    version = table.get("format", FORMAT)
    if version != FORMAT:
        raise UserError(
            f"format = {version!r}: this configuration was written by another version of fedtailor; this one reads "
            f"format {FORMAT}. Install the version named in the run's run.json, or start from a preset again."
        )
    return read(Config, table, "")


def resolve(config: Config) -> Config:
    """Checks what no single key can tell, and keeps of [space] and [net] the one the method uses."""
    if config.participants > config.clients:
        raise UserError(
            f"participants = {config.participants}: there are only {config.clients} clients. "
            f"Give at most {config.clients}, or raise 'clients'."
        )
    method = config.make_method()
    if not config.net and not config.space:
        config = dataclasses.replace(config, net={"name": "cnn"})
    if config.archs:
        return _given_archs(config, method)
    if method.needs == "space" and not config.space:
        raise UserError(
            f"method.name = '{config.method['name']}' searches among architectures, but the config has only the fixed "
            f"net '{config.net['name']}'. Give a search space, for example --set space.name=tiny."
        )
    if method.needs == "net" and not config.net:
        raise UserError(
            f"method.name = '{config.method['name']}' trains one fixed network, but the config has only the search "
            f"space '{config.space['name']}'. Give a network, for example --set net.name=cnn; or give every client an "
            f"arch of the space, for example --set archs=random."
        )
    config = _checked(config, "net" if method.needs == "space" else "space")
    return dataclasses.replace(config, net=_with_options(config.net, method.net_options)) if config.net else config


def _with_options(net: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The [net] table with the options that a method needs, where the net has them and nobody set them."""
    from .registry import lookup

    found = lookup("net", _name(net, "net"))
    known = {f.name for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    return {k: v for k, v in options.items() if k in known} | dict(net)


def _given_archs(config: Config, method: Method) -> Config:
    """Archs given to clients want a space, and a method that does not choose archs itself."""
    name, says = config.method["name"], f"archs = '{config.archs}'"
    if method.needs == "space":
        raise UserError(f"{says}: method.name = '{name}' chooses the archs itself. Leave 'archs' out.")
    if method.one_network:
        raise UserError(f"{says}: method.name = '{name}' needs the same network everywhere: {method.one_network}.")
    if not config.space:
        raise UserError(f"{says} gives every client an arch of a space. Name it, for example --set space.name=tiny.")
    return _checked(config, "net")


def _checked(config: Config, unused: str) -> Config:
    config = dataclasses.replace(config, **{unused: {}})
    config.make_partition().check(config.clients)
    config.make_fleet()
    return config


def preset_names() -> list[str]:
    return sorted(p.stem for p in PRESETS.glob("*.toml"))


def describe_preset(name: str) -> str:
    """The comment on a preset's first line."""
    first = (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()


def _read_toml(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.suffix != ".toml":
        preset = PRESETS / f"{source}.toml"
        if not preset.is_file():
            raise unknown("preset", str(source), preset_names())
        path = preset
    if not path.is_file():
        raise UserError(f"there is no configuration file {path}. 'fedtailor list presets' shows the ones that ship.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: write it as key=value, for example --set local.lr=0.1.")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _changed(table: Mapping[str, Any], path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    head, rest = path[0], path[1:]
    if not rest:
        old = table.get(head)
        if isinstance(old, dict) and not isinstance(value, dict):
            named = head in ("method", "space", "net", "data", "public", "partition", "fleet")
            example = f"name={value}" if named else f"{next(iter(old), 'KEY')}=..."
            raise UserError(f"'{key}' is a table; set one of its keys, for example {key}.{example}.")
        if isinstance(old, dict) and value and "name" not in value:  # what it leaves out stays; what has a name is new
            for inner, one in value.items():
                old = _changed(old, [inner], one, f"{key}.{inner}")
            return {**table, head: old}
        return {**table, head: value}
    inner = table.get(head, {})
    if isinstance(inner, list):  # several spaces to choose from: naming one takes it, or another
        if rest != ["name"]:
            raise UserError(f"'{key}': the config lists several; name one first, for example --set {head}.name=...")
        inner = next((entry for entry in inner if entry.get("name") == value), {})
    if head == "name" or not isinstance(inner, Mapping):
        raise UserError(f"'{key}': '{head}' is a value, not a table.")
    inner = dict(inner)
    if rest == ["name"] and inner.get("name") != value and head in ("method", "space", "net", "partition", "fleet"):
        inner = {}  # another method's options mean nothing to this one
    return {**table, head: _changed(inner, rest, value, key)}


def _one_of(table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The table with, of several `[[space]]` or `[[net]]` tables, the first that the method can use."""
    entries = table.get(kind)
    if not isinstance(entries, list) or not entries:
        return dict(table)
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(f"{kind} = {entries!r}: to choose from several, write a table for each: [[{kind}]], name = ...")
    from .registry import lookup

    method = _method_class(table.get("method", {"name": "fedavg"}))
    usable = (entry for entry in entries if method.runs_on(lookup(kind, _name(entry, kind))))
    return {**table, kind: next(usable, entries[0])}


def _name(table: Mapping[str, Any], kind: str) -> str:
    name = table.get("name")
    if not isinstance(name, str):
        key = next(iter(table), "")
        hint = nearest(key, ["name"]) if key else ""
        raise UserError(
            f"[{kind}] needs a name, for example {kind}.name = ...{hint} 'fedtailor list {kind}s' shows them."
        )
    return name


def _method_class(table: Mapping[str, Any]) -> type[Method]:
    """The class of a [method]; raises where a user's own is no method yet, and says what it lacks."""
    from .method import Method
    from .registry import lookup

    name = _name(table, "method")
    found = lookup("method", name)
    where = f"method.name = '{name}': {getattr(found, '__name__', found)}"
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{where} is no method. Derive it from fedtailor.method.Method.")
    if found.__abstractmethods__:
        raise UserError(f"{where} has no {', '.join(sorted(found.__abstractmethods__))}, which every method needs.")
    if not dataclasses.is_dataclass(found):
        raise UserError(f"{where} is no dataclass. Write @dataclass(frozen=True) above the class.")
    return found


def _rest(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != "name"}
