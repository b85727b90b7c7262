"""A method in a file of one's own: slips are told where they are, and the file stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor import UserError
from fedtailor.config import load
from fedtailor.errors import Diverged
from fedtailor.registry import lookup
from fedtailor.runs.execute import open_space, read_networks, start
from tools import small_config

METHOD = """
from dataclasses import dataclass
from fedtailor.method import Method, Reply, Server, Task
from fedtailor.registry import register

@register("method", "own")
@dataclass(frozen=True)
class Own(Method):
    def start(self, job):
        return Server(job, weights=job.space.new_weights(job.seed))

    def ask(self, server, client):
        return Task(server.weights)

    async def work(self, task, client):
        net = client.build(task)
        loss = await client.fit(net)
        return Reply(client.take(net), facts={"loss": loss})

    def merge(self, server, replies):
        return server.replace(weights=server.paste(replies))

    def shared(self, server):
        return server.whole()
"""
WORK = METHOD[METHOD.index("    async def work") : METHOD.index("        return Reply")].rstrip("\n")
LOST = "{n: t * 0 + float('VALUE') for n, t in server.paste(replies).items()}"


def written(folder: Path, old: str = "", new: str = "", name: str = "own.py") -> str:
    """A file with the method, one place of it changed; its path."""
    assert old in METHOD
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(METHOD.replace(old, new) if old else METHOD)
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "def ask(self, server, client):",
            "def ask(self, server, client)",
            r"SyntaxError in .*own.py, line 12: expected",
        ),
        ("import register", "import registr", r"ImportError in .*own.py, line 4: cannot import name 'registr'"),
        ("class Own(Method):", "class Own(Method):\n    a: int = 0\n    b: int", r"TypeError in .*own.py, line 7: "),
        ("def merge", "def merg", r"Own has no merge"),
        ("@dataclass(frozen=True)", "", r"Own is no dataclass"),
        ("class Own(Method)", "class Own", r"Own is no method"),
    ],
)
def test_a_file_that_is_no_method_yet(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load("demo", {"method.name": written(tmp_path, old, new)})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return Server(job", "Server(job", r"Own.start returned NoneType; it has to return a Server"),
        ("return Task(server.weights)", "return server.weights", r"Own.ask returned dict; it has to return a Task"),
        ("return Reply", "Reply", r"round 1, client client-\d+: .*Own.work returned NoneType; it has to return a"),
        ("return server.replace", "server.replace", r"Own.merge returned NoneType; it has to return a Server"),
        ("loss = await", "loss =", r"'loss' was never computed: write 'await'"),
        (WORK, "    def work(self, task, client):\n        net, loss = client.build(task), 1.0", r"'async def work'"),
        (
            "def shared",
            "async def personal(self, task, client):\n        pass\n\n    def shared",
            r"personal network of client client-.*Own.personal returned NoneType; it has to return a Module",
        ),
    ],
)
def test_a_slip_against_the_contract(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(small_config(written(tmp_path, old, new), rounds=1), tmp_path / "run", "cpu", 1)


SPACE = """
from dataclasses import dataclass
from torch import nn
from fedtailor.registry import register
from fedtailor.spaces.base import Arch, Dimension, Space

class Net(nn.Module):
    def __init__(self, space, width, depth):
        super().__init__()
        inner = [nn.Linear(64 if i == 0 else width, width) for i in range(depth)]
        self.body = nn.Sequential(nn.Flatten(), *inner)
        self.head = nn.Linear(width, space.classes)

    def forward(self, x):
        return self.head(self.body(x))

@register("space", "own-space")
@dataclass(frozen=True)
class Own(Space):
    @property
    def dimensions(self):
        return (Dimension("width", (8, 16)), Dimension("depth", (1, 2)))

    def build(self, arch):
        width, depth = [d.options[i] for d, i in zip(self.dimensions, arch)]
        return Net(self, width, depth)
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"depth"', '"width"', "two dimensions are called 'width'"),
        ("(1, 2)", "()", "dimension 'depth' has no options"),
        (
            "super().__init__()",
            "super().__init__(); setattr(self, f'w{width}', nn.Linear(1, 1))",
            "not in the supernet",
        ),
    ],
)
def test_a_slip_in_a_space(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SPACE
    (tmp_path / "space.py").write_text(SPACE.replace(old, new, 1))
    config = small_config("perfedrlnas", space__name=str(tmp_path / "space.py"), rounds=1)
    with pytest.raises(UserError, match=f"space 'own-space': .*{message}"):
        start(config, tmp_path / "run", "cpu", 1)


@pytest.mark.parametrize("value", ["nan", "inf"])  # the last step may also have gone beyond all numbers
def test_numbers_lost_in_the_last_round_are_no_accuracy(tmp_path: Path, value: str) -> None:
    """A network of nans answers with the first class whatever it sees, which is often right."""
    method = written(tmp_path, "server.paste(replies)", LOST.replace("VALUE", value))
    with pytest.raises(Diverged, match=r"client client-.*not a number, in 'body"):
        start(small_config(method, rounds=1), tmp_path / "run", "cpu", 1)
    assert "test" not in (tmp_path / "run" / "events.csv").read_text()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_global_model_of_nans_is_no_accuracy_either(tmp_path: Path, value: str) -> None:
    """Clients keep what they had: only the server's model is lost."""
    whole = (
        "server.whole()\n\n    def offer(self, server, client):\n        return Task(server.job.space.new_weights(0))"
    )
    path = Path(written(tmp_path, "server.whole()", whole))
    path.write_text(path.read_text().replace("server.paste(replies)", LOST.replace("VALUE", value)))
    with pytest.raises(Diverged, match="global model"):
        start(small_config(str(path), rounds=1), tmp_path / "run", "cpu", 1)


def test_a_renamed_method_is_one_method(tmp_path: Path) -> None:
    """A notebook loads the same file again and again while it is written."""
    lookup("method", written(tmp_path))
    assert lookup("method", written(tmp_path, '"own"', '"owner"')).name == "owner"


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    first = written(tmp_path / "a")
    assert lookup("method", first).name == "own"
    assert lookup("method", written(tmp_path / "b", '"own"', '"other"')).name == "other"
    assert lookup("method", first).name == "own"


def test_a_copy_of_ditto_does_not_become_ditto(tmp_path: Path) -> None:
    """Who starts from a shipped file, and leaves its name in it, still compares with the shipped one."""
    shipped = lookup("method", "ditto")
    own = lookup("method", written(tmp_path, '"own"', '"ditto"'))
    assert own is not shipped
    assert lookup("method", "ditto") is shipped


@pytest.mark.parametrize("net", ["Strip", "small"])
def test_a_network_inside_a_network_is_found_by_its_file(tmp_path: Path, net: str) -> None:
    """kNN-Per wraps the run's net: its kept networks name what builds them."""
    name = f"{Path(__file__).parents[1] / 'examples' / 'own_net.py'}:{net}"
    folder = start(small_config("knn-per", rounds=1, **{"net.name": name}), tmp_path / "run", "cpu", 1)
    assert len(read_networks(folder, open_space(folder))) == 4
