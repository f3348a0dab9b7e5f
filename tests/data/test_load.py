"""`data.load`: one door to published, synthetic, registered and a user's own data."""

import dataclasses

import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import catalog
from fedjax_graph.data.graphs import datasets as graphs
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import synthetic as synthetic_images
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import synthetic as synthetic_traffic
from tests import tables


@pytest.fixture(autouse=True)
def own_tables():
    with tables.kept():
        yield


def fields(dataset):
    is_tuple = isinstance(dataset, tuple)
    values = dataset._asdict() if is_tuple else dataclasses.asdict(dataset)
    return {
        name: value.toarray() if scipy.sparse.issparse(value) else value
        for name, value in values.items()
    }


def assert_same(left, right):
    assert type(left) is type(right)
    for name, value in fields(left).items():
        npt.assert_array_equal(value, fields(right)[name], err_msg=name)


@pytest.fixture
def roads(tmp_path):
    path = tmp_path / "roads.npz"
    rng = np.random.default_rng(0)
    np.savez(
        path,
        speed=rng.uniform(20, 70, (63, 2)),
        adjacency=np.array([[1, 0.5], [0, 1]]),
        start_ns=0,
        freq_ns=300 * 10**9,
    )
    return str(path)


@pytest.fixture
def pictures(tmp_path):
    path = tmp_path / "pictures.npz"
    pixels = np.arange(4 * 60, dtype=np.uint8).reshape(4, 4, 5, 3)
    np.savez(
        path,
        train_images=pixels[:3],
        train_labels=np.array([1, 0, 1]),
        test_images=pixels[3:],
        test_labels=np.array([1]),
    )
    return str(path)


@pytest.fixture
def papers(tmp_path):
    path = tmp_path / "papers.npz"
    np.savez(
        path,
        edges=np.array([[0, 1], [1, 2]]),
        labels=np.array([0, 1, 0]),
        features=np.eye(3, dtype=np.float32),
    )
    return str(path)


def test_every_published_dataset_is_known_under_its_kind():
    kinds = {"traffic": traffic, "images": images, "graphs": graphs}
    for kind, module in kinds.items():
        assert module.PUBLISHED
        for name, published in module.PUBLISHED.items():
            assert data.kind_of(name) == kind
            assert data.DATASETS[name].description == published.description


def test_a_file_is_told_by_what_is_in_it(roads, pictures, papers):
    assert data.kind_of(roads) == "traffic"
    assert data.kind_of(pictures) == "images"
    assert data.kind_of(papers) == "graphs"
    assert_same(data.load(roads), traffic.load(roads))
    assert_same(data.load(pictures), images.load(pictures))
    assert_same(data.load(papers), graphs.load(papers))


def test_folders_are_told_by_their_files(tmp_path):
    assert data.kind_of(str(tmp_path)) == "images"
    (tmp_path / "ind.mine.graph").touch()
    assert data.kind_of(str(tmp_path)) == "graphs"
    assert data.kind_of(str(tmp_path / "absent.npz")) == "traffic"


def test_a_published_dataset_is_found_in_the_folder(roads, tmp_path, monkeypatch):
    published = traffic.PUBLISHED["metr_la"]._replace(num_sensors=2)
    monkeypatch.setitem(traffic.PUBLISHED, "metr_la", published)
    (tmp_path / "roads.npz").rename(tmp_path / "metr_la.npz")
    assert_same(data.load("metr_la", tmp_path), traffic.load("metr_la", tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        (
            "synthetic",
            {"num_sensors": 4, "num_days": 1, "seed": 3},
            synthetic_traffic.traffic_network,
        ),
        (
            "synthetic_images",
            {"num_train": 20, "num_test": 10, "size": 8},
            synthetic_images.images,
        ),
        (
            "synthetic_graph",
            {"num_nodes": 60, "mean_degree": 2, "seed": 2},
            synthetic_graphs.node_graph,
        ),
    ],
)
def test_synthetic_datasets_take_options(name, options, make):
    assert_same(data.load(name, **options), make(**options))


def test_a_kind_has_a_synthetic_dataset_of_its_own():
    assert catalog.resolve("synthetic") == "synthetic"
    assert catalog.resolve("synthetic", "traffic") == "synthetic"
    assert catalog.resolve("synthetic", "images") == "synthetic_images"
    assert catalog.resolve("synthetic", "graphs") == "synthetic_graph"
    assert catalog.find("physics") == catalog.DATASETS["coauthor_physics"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("metr-la", {}, ["unknown dataset 'metr-la'", "metr_la", "cora", ".npz file"]),
        ("coral", {"kind": "graphs"}, ["unknown dataset 'coral'", "cora, citeseer"]),
        ("cora", {"kind": "images"}, ["'cora' is of the kind graphs", "cifar10"]),
        ("cora", {"kind": "image"}, ["kind='image'", "graphs, images, traffic"]),
        ("cora", {"needs_graph": False}, ["no option 'needs_graph'; known: none"]),
        ("synthetic", {"days": 2}, ["no option 'days'; known: num_sensors, num_days"]),
        ("absent.npz", {}, ["absent.npz: no such file"]),
        ("absent.npz", {"kind": "graphs"}, ["absent.npz: no such file"]),
    ],
)
def test_bad_input_is_one_line(name, settings, words, cache):
    with pytest.raises(InputError) as raised:
        data.load(name, **settings)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_only_names_of_the_kind_are_listed(cache):
    with pytest.raises(InputError) as raised:
        data.load("nowhere", kind="traffic")
    assert "pems_bay" in str(raised.value)
    assert "cifar10" not in str(raised.value) and "Planetoid" not in str(raised.value)


def test_statistics_are_those_of_the_kind(roads, pictures, papers):
    assert data.statistics(data.load(roads))["num_nodes"] == 2
    assert data.statistics(data.load(pictures))["train_images"] == 3
    assert data.statistics(data.load(papers))["num_edges"] == 2
    with pytest.raises(InputError, match="dataset is a dict"):
        data.statistics({})


def test_a_dataset_of_ones_own_has_a_name(network, tmp_path):
    @data.register_dataset("mine", kind="traffic", description="five sensors")
    def mine(data_dir=None, scale=1.0):
        assert data_dir in (None, tmp_path)
        return dataclasses.replace(network, speed=scale * network.speed)

    assert data.kind_of("mine") == "traffic"
    assert data.DATASETS["mine"].description == "five sensors"
    assert_same(data.load("mine"), network)
    twice = data.load("mine", tmp_path, scale=2.0)
    npt.assert_array_equal(twice.speed, 2 * network.speed)
    with pytest.raises(InputError, match="no option 'size'; known: scale"):
        data.load("mine", size=3)
    for name in ("mine", "cora"):
        with pytest.raises(InputError, match=f"dataset '{name}' is taken"):
            data.register_dataset(name, mine, kind="traffic")
    with pytest.raises(InputError, match="kind='roads': unknown; known: "):
        data.register_dataset("other", mine, kind="roads")


def test_a_loader_has_to_return_its_kind(network):
    data.register_dataset("wrong", lambda: network, kind="graphs")
    with pytest.raises(InputError, match="'wrong': its loader returned a TrafficData"):
        data.load("wrong")


def test_a_name_that_is_nearly_right_is_told():
    for name, expected in (
        ("metr-la", "metr_la"),
        ("synthetic-graph", "synthetic_graph"),
    ):
        with pytest.raises(InputError, match=rf"'{name}' \(is {expected} meant\?\)"):
            data.load(name)
