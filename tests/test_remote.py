"""A server and its clients behind messages, without a network: the same numbers as on one machine, and faults."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from fedtailor.cli import progress
from fedtailor.config import Config, load
from fedtailor.data.sources import load as load_data
from fedtailor.engine import crowd, remote
from fedtailor.engine.crowd import Waiting
from fedtailor.engine.parcel import pack, unpack
from fedtailor.engine.site import Site
from fedtailor.engine.wire import Request
from fedtailor.errors import UserError
from fedtailor.export.write import export_run
from fedtailor.registry import lookup, names
from fedtailor.report.html import write_report
from fedtailor.runs.execute import Watcher, prepare, resume, start
from fedtailor.runs.join import join, refit
from fedtailor.runs.results import Results
from fedtailor.runs.serve import serve
from fedtailor.runs.welcome import welcome
from grid import MemoryPost, quiet
from test_join import write_digits
from tools import rows, small_config

NAMES = tuple(f"client-{i:03d}" for i in range(4))
PRIVATE = ("personal_arch", "personal_parameters", "personal_flops", "new_arch", "new_parameters", "new_flops")
REAL = ("perfedrlnas", "spider", "fedrep")  # test_flower.py runs them over a network
FEW = {"clients": 2, "participants": 1, "evaluate_every": 2, "local__batch": 4, "partition__samples": 20}
CELLS = ("direct-fednas", "fednas", "fednas-personal", "global-perturbation")  # they search among cells


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "POLL", 0.001)
    monkeypatch.setattr(crowd, "LOOK", 0.0)
    monkeypatch.setattr(crowd, "AGAIN", 0.01)
    monkeypatch.setattr(remote, "AGAIN", 0.01)
    monkeypatch.setattr(remote, "PATIENCE", 0.1)


class Listener(Watcher):
    """Remembers what a server says; may break off when a round ends."""

    def __init__(self, at: int = 0, do: Callable[[], None] | None = None) -> None:
        self.at, self.do, self.said = at, do, ""
        self.states: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        self.said += text + "\n"

    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == self.at and self.do:
            self.do()

    def clients(self, states: dict[str, str]) -> None:
        self.states.append(states)


def crash() -> None:
    raise RuntimeError("power cut")


def config_of(method: str, **changes: object) -> Config:
    return small_config(method, **{"rounds": 2, "evaluate_every": 1, "local__epochs": 0.2, **changes})


def public(folder: Path) -> list[str]:
    """The rows that are the same wherever clients are: not what only a client knows of its own network."""
    return [row for row in rows(folder) if row.split(",")[3] not in PRIVATE]


def state_of(folder: Path) -> bytes:
    """The server's last state."""
    return sorted((folder / "checkpoints").glob("server-*.safetensors"))[-1].read_bytes()


def network_of(sites: Path, name: str) -> bytes:
    return next(sites.glob(f"{name}/*/nets/000000.safetensors")).read_bytes()


def require_same(served: Path, local: Path, sites: Path, clients: tuple[str, ...] = NAMES) -> None:
    assert public(served) == public(local)
    assert state_of(served) == state_of(local)
    for i, name in enumerate(clients):
        assert network_of(sites, name) == (local / "nets" / f"{i:06d}.safetensors").read_bytes()


@pytest.mark.parametrize("method", [m for m in names("method") if m not in REAL])
def test_every_method_gives_the_same_numbers_over_messages(method: str, tmp_path: Path) -> None:
    config = config_of(method, **(FEW if method in CELLS else {}))
    clients = NAMES[: config.clients]
    local = start(config, tmp_path / "local", "cpu", 1)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", clients), clients)
    require_same(served, local, tmp_path / "sites", clients)


def test_layers_that_are_called_the_head_cross_as_declared(tmp_path: Path) -> None:
    config = config_of("lg-fedavg", clients=2, method__head=["head", "body.7"])
    local = start(config, tmp_path / "local", "cpu", 1)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES[:2]), NAMES[:2])
    require_same(served, local, tmp_path / "sites", NAMES[:2])


def test_clients_that_send_nothing_search_all_the_same(tmp_path: Path) -> None:
    config = config_of("spider", **FEW, method__lamda=0.0)
    clients = NAMES[: config.clients]
    local = start(config, tmp_path / "local", "cpu", 1)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", clients), clients)
    require_same(served, local, tmp_path / "sites", clients)
    sent = [float(r.split(",")[4]) for r in (served / "events.csv").read_text().splitlines() if ",bytes_" in r]
    assert sent
    assert not any(sent)


def test_a_public_set_of_the_servers_is_given_to_the_clients(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (90, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "noise.npz", images=images, labels=np.zeros(90, np.int64))
    config = config_of("perfedckt", public__name=f"npz:{tmp_path / 'noise.npz'}", public__images=70)
    local = start(config, tmp_path / "local", "cpu", 1)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES), NAMES)
    require_same(served, local, tmp_path / "sites")
    own = next((tmp_path / "sites").glob(f"{NAMES[0]}/*/run.json")).parent
    assert prepare(load(own / "config.toml"), own / "partition.npz").job.public == 70  # the client's folder is whole


def test_a_client_refuses_a_public_set_that_holds_its_own_images(tmp_path: Path) -> None:
    config, said = config_of("perfedckt"), list[str]()
    data = load_data("digits").images
    site = Site(NAMES[0], tmp_path, say=said.append)
    for images, problem in ((data[:500], "data"), (data[:500, :4], "data"), (255 - data[:500], "")):
        hello = Request("run", "1", config.to_toml(), public=torch.from_numpy(images.copy()))
        assert unpack(site.answer(hello.pack()))["problem"] == problem
    assert "public images are this client's own" in said[0]
    assert "have to be the same" in said[2]


def test_a_run_goes_on_with_the_public_set_it_began_with(tmp_path: Path) -> None:
    path = tmp_path / "noise.npz"
    np.savez(path, images=np.zeros((20, 8, 8, 1), np.uint8), labels=np.zeros(20, np.int64))
    config = config_of("perfedckt", public__name=f"npz:{path}", public__images=0)
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES), NAMES, watch=Listener(1, crash))
    np.savez(path, images=np.ones((20, 8, 8, 1), np.uint8), labels=np.zeros(20, np.int64))
    with pytest.raises(UserError, match="not the set that the run began with"):
        serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES), NAMES)


def test_held_out_clients_join_over_messages(tmp_path: Path) -> None:
    config = config_of("perfedrlnas", partition__new_clients=2, partition__samples=40)
    clients = tuple(f"client-{i:03d}" for i in range(6))
    local = start(config, tmp_path / "local", "cpu", 1)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", clients), clients)
    require_same(served, local, tmp_path / "sites", clients)
    assert len([r for r in rows(served) if ",test,new_accuracy," in r]) == 2


@pytest.mark.parametrize("method", ["perfedrlnas", "fedrep", "pfedhn", "fedavg", "perfedckt"])
def test_a_newcomer_joins_a_served_run_as_it_joins_a_local_one(method: str, tmp_path: Path) -> None:
    """Search on the frozen supernet, a head of its own, a new embedding, a fine-tuned copy: bit for bit the same."""
    config = config_of(method, clients=2, participants=2, evaluate_every=2)
    photos = write_digits(tmp_path / "photos", np.arange(1500, 1560), scale=2)
    local = start(config, tmp_path / "local", "cpu", 1)
    joined = join(local, f"folder:{photos}", "berlin", tmp_path / "joined", device="cpu", workers=1, say=quiet)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES[:2]), NAMES[:2])
    before = {p: p.read_bytes() for p in served.rglob("*") if p.is_file()}
    post, listener = MemoryPost(tmp_path / "sites", ("client-000", "berlin"), data=f"folder:{photos}"), Listener()
    assert welcome(served, post, 1, watch=listener) == ["berlin"]
    assert "'client-000' is not taken in: it was in the run" in listener.said
    assert "berlin has its network: accuracy on val" in listener.said
    assert {p: p.read_bytes() for p in served.rglob("*") if p.is_file()} == before  # the run is left as it is
    (home,) = (p.parent for p in (tmp_path / "sites" / "berlin").glob("*/run.json"))
    for file in ("nets/000000.safetensors", "offer.safetensors", "events.csv", "data.npz"):
        assert (home / file).read_bytes() == (joined / file).read_bytes(), file
    card = lookup("method", method).card
    sent = [unpack(answer)["worked"]["reply"] for name, _, answer in post.sent if unpack(answer)["worked"]]
    assert all(not card.up.undeclared(r["weights"]["names"], r["extra"]["names"], r["facts"]) for r in sent)
    assert len(sent) == {"perfedrlnas": 20, "pfedhn": 20}.get(method, 0)


def test_who_cannot_join_a_served_run(tmp_path: Path) -> None:
    config, said = config_of("fedavg", clients=2, rounds=1), []
    photos = write_digits(tmp_path / "photos", np.arange(1500, 1530), scale=2)
    (photos / "3").rename(photos / "three")
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES[:2]), NAMES[:2])
    listener, post = Listener(), MemoryPost(tmp_path / "sites", ("berlin", "paris"), data=f"folder:{photos}")
    post.sites[1].say = said.append
    post.sites[2].data = f"folder:{write_digits(tmp_path / 'more', np.arange(1500, 1530))}"
    assert welcome(served, post, 1, watch=listener) == ["paris"]
    assert "berlin has a problem: its data cannot be used" in listener.said
    assert any("the run knows no class 'three'" in text for text in said)
    with pytest.raises(UserError, match="--onboard"):
        join(served, f"folder:{photos}", "berlin", tmp_path / "out", say=quiet)
    with pytest.raises(UserError, match="was not served"):
        welcome(start(config, tmp_path / "local", "cpu", 1), post, 1)


def test_a_real_client_takes_its_network_home_and_fits_it_again(tmp_path: Path) -> None:
    """Its folder is a run folder: it is exported, and made again from new data, without a server."""
    root, clients = folders(tmp_path / "data", lacking="cyst"), ("ash", "birch", "cedar")
    post = MemoryPost(tmp_path / "sites", clients)
    for site in post.sites.values():
        site.data = f"folder:{root / site.name}"
    served = serve(config_of("ditto", clients=3, **NATURAL), tmp_path / "run", post, clients)
    (home,) = (p.parent for p in (tmp_path / "sites" / "birch").glob("*/run.json"))
    home = home.rename(tmp_path / "moved")
    (exported,) = export_run(home, int8=False, say=quiet)
    assert exported.card["warnings"] == []
    assert exported.card["classes"] == ["benign", "cyst", "tumour"]
    ids = {site.name: i for i, site in enumerate(post.sites.values())}
    (row,) = (r for r in rows(served) if r.split(",")[1] == str(ids["birch"]) and ",test,personal_accuracy," in r)
    assert exported.card["accuracy"]["test"]["accuracy"] == float(row.split(",")[-1])
    out, compared = refit(home, "birch", f"folder:{root / 'birch'}", tmp_path / "again", epochs=0, say=quiet)
    assert compared["val"][0] == compared["val"][1]  # the same pictures and no more training: the same network
    assert Results.read(out).facts["joined"]["run"] == home.name
    with pytest.raises(UserError, match="with its clients"):
        export_run(served)


@pytest.mark.parametrize("method", ["fml", "perfedckt"])
def test_a_client_fits_the_private_network_again_that_it_was_dealt(method: str, tmp_path: Path) -> None:
    """In its own folder a client is the first and only one, and would be dealt the first network."""
    private = [{"name": "cnn", "width": 4, "hidden": 8}, {"name": "cnn", "width": 6, "hidden": 8}]
    folder = start(config_of(method, clients=3, participants=3, method__private=private), tmp_path / "run", "cpu", 1)
    home, again = tmp_path / "home", tmp_path / "again"
    refit(folder, "client-001", "", home, epochs=0, say=quiet)
    _, compared = refit(home, "client-001", "", again, epochs=0, say=quiet)
    assert compared["val"][0] == compared["val"][1]  # the same pictures and no more training: the same network
    assert load(again / "config.toml").make_method().private == (private[1],)  # type: ignore[attr-defined]


def test_a_client_with_a_memory_on_the_arch_that_it_was_given_fits_again(tmp_path: Path) -> None:
    """What kNN-Per's clients keep is no arch of the space; the arch below it is the one that was given."""
    config = config_of("knn-per", clients=3, participants=3, space__name="tiny", archs="random")
    folder, home = start(config, tmp_path / "run", "cpu", 1), tmp_path / "home"
    refit(folder, "client-001", "", home, epochs=0, say=quiet)
    _, compared = refit(home, "client-001", "", tmp_path / "again", epochs=0, say=quiet)
    assert compared["val"][0] == compared["val"][1]


def test_one_message_per_client_and_round(tmp_path: Path) -> None:
    post = MemoryPost(tmp_path / "sites", NAMES)
    serve(config_of("fedrep", participants=4), tmp_path / "served", post, NAMES)
    assert [name for name, _, _ in post.sent] == list(NAMES) * 4  # hello, two rounds, the end


def test_the_run_folder_is_like_any_other(tmp_path: Path) -> None:
    listener = Listener()
    folder = serve(config_of("fedrep"), tmp_path / "run", MemoryPost(tmp_path / "s", NAMES), NAMES, watch=listener)
    assert write_report(folder).stat().st_size > 10_000
    assert listener.states[-1] == dict.fromkeys(NAMES, "ready")
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"done"', '"stopped"'))
    with pytest.raises(UserError, match="run of a server"):
        resume(folder, "cpu", 1)


# data of one's own --------------------------------------------------------------------------------------------------


NATURAL = {"partition__name": "natural", "partition__samples": 0}


def folders(root: Path, lacking: str = "") -> Path:
    """Three hospitals' images by class, some of which one of them may lack."""
    rng = np.random.default_rng(0)
    for client in ("ash", "birch", "cedar"):
        for label, kind in enumerate(("benign", "cyst", "tumour")):
            if (client, kind) == ("birch", lacking):
                continue
            (root / client / kind).mkdir(parents=True)
            for i in range(8 + label):
                pixels = np.clip(rng.normal(60 + 60 * label, 30, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / client / kind / f"{i}.png")
    return root


def test_folders_of_their_own_equal_a_natural_partition(tmp_path: Path) -> None:
    root, clients = folders(tmp_path / "data", lacking="cyst"), ("ash", "birch", "cedar")
    config = config_of("fedrep", clients=3, data__name=f"folder:{root}", **NATURAL)
    local = start(config, tmp_path / "local", "cpu", 1)
    post = MemoryPost(tmp_path / "sites", clients)
    for site in post.sites.values():
        site.data = f"folder:{root / site.name}"
    served = serve(config, tmp_path / "served", post, clients)
    require_same(served, local, tmp_path / "sites", clients)


def test_broken_data_is_told_to_both_sides_and_the_rest_go_on(tmp_path: Path) -> None:
    root, clients, said = folders(tmp_path / "data"), ("ash", "birch", "cedar"), []
    (root / "birch" / "cyst" / "3.png").write_bytes(b"not an image")
    config = config_of("fedavg", clients=3, **NATURAL)
    post, listener = MemoryPost(tmp_path / "sites", clients), Listener()
    for site in post.sites.values():
        site.data, site.say = f"folder:{root / site.name}", said.append
    served = serve(config, tmp_path / "run", post, clients, start_with=2, watch=listener)
    assert "birch has a problem: its data cannot be used" in listener.said
    assert "3.png" not in listener.said  # a file's name may be a patient's
    assert any("3.png" in text for text in said)
    assert len([r for r in rows(served) if ",test,personal_accuracy," in r]) == 2


@pytest.mark.parametrize(
    "table",
    [
        "[method]\nname = '{}'\n[net]\nname = 'cnn'\n",
        "[method]\nname = 'fedavg'\n[net]\nname = '{}:Net'\n",
        "[method]\nname = 'perfedrlnas'\nrewards = ['accuracy', '{}:reward']\n[space]\nname = 'tiny'\n",
        "[method]\nname = 'fml'\nprivate = [{{name = 'cnn'}}, {{name = '{}'}}]\n[net]\nname = 'cnn'\n",
    ],
)
def test_a_client_runs_no_code_that_its_owner_does_not_trust(table: str, tmp_path: Path) -> None:
    code = tmp_path / "evil.py"
    code.write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'proof')!r}).touch()\n")
    request = crowd.Request("run", "1", table.format(code))
    said: list[str] = []
    site = Site("client-000", tmp_path / "site", say=said.append)
    assert unpack(site.answer(request.pack()))["problem"] == "request"
    assert not (tmp_path / "proof").exists()
    assert "--trust" in said[0]


def test_what_a_server_says_does_not_write_on_a_clients_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    site = Site("client-000", tmp_path / "site", say=said.append)
    request = crowd.Request("run", "1", "[method]\nname = '\\u001b[2J.py'\n".replace("'", '"'))
    assert unpack(site.answer(request.pack()))["problem"] == "request"
    assert "'?[2J.py', which --trust" in said[0]
    assert all(line.isprintable() for line in said)


@pytest.mark.parametrize("terminal", [False, True])
def test_names_with_brackets_are_shown_as_they_are(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, legacy_windows=False)
    watchers = (progress.watcher(console, False), progress.crowd_watcher(console, False))
    for watch in watchers:
        watch.begin("[/b].py on digits", 0, 10)
        watch.clients({"[/c]": "lost"})
        watch.say("[/d] is lost")
        watch.round(1, {})
        watch.end()
    assert all(out.getvalue().count(name) >= 1 for name in ("[/b].py", "[/c]", "[/d]"))


def test_a_method_of_ones_own_runs_where_it_is_trusted(tmp_path: Path) -> None:
    own = str(Path(__file__).parent.parent / "examples" / "own_method.py")
    config = config_of(own)
    local = start(config, tmp_path / "local", "cpu", 1)
    post = MemoryPost(tmp_path / "sites", NAMES)
    for site in post.sites.values():
        site.trust = (own,)
    require_same(serve(config, tmp_path / "served", post, NAMES), local, tmp_path / "sites")


def test_what_a_method_does_not_declare_does_not_leave_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = (Path(__file__).parent.parent / "examples" / "own_method.py").read_text()
    more, none = tmp_path / "more.py", tmp_path / "none.py"
    more.write_text(example.replace('facts={"loss": loss}', 'facts={"loss": loss, "patients": 7}'))
    none.write_text(example.replace("card: ClassVar[Card] =", "notes: ClassVar[Card] ="))
    monkeypatch.setattr(remote, "TRIES", 1)
    listener, post = Listener(), MemoryPost(tmp_path / "sites", NAMES[:1])
    post.sites[1].trust = (str(more),)
    with pytest.raises(UserError, match="nothing that could be used"):
        serve(config_of(str(more), clients=1, participants=1), tmp_path / "more", post, NAMES[:1], watch=listener)
    assert "client-000 has a problem: it kept back a reply" in listener.said
    assert not any(b"patients" in answer.data or "patients" in answer.layout for _, _, answer in post.sent)
    with pytest.raises(UserError, match="it has no card"):
        serve(config_of(str(none), clients=1, participants=1), tmp_path / "none", post, NAMES[:1])


def test_a_client_refuses_a_run_whose_name_is_a_path(tmp_path: Path) -> None:
    post = MemoryPost(tmp_path / "sites", NAMES)
    serve(config_of("ditto", rounds=1), tmp_path / "run", post, NAMES)
    _, parcel, _ = next(s for s in post.sent if unpack(s[1])["work"])
    value = unpack(parcel)
    value["run"] = "../../elsewhere"
    site = next(s for s in post.sites.values() if s.name == value["seat"]["name"])
    assert unpack(site.answer(pack(value)))["problem"] == "request"
    assert dataclasses.asdict(Waiting()) == {"deadline": 0.0, "quorum": 1}
