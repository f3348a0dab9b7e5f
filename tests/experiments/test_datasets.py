"""The binary as a user runs it: a process, its output and its exit status."""

import json
import shutil

import numpy as np
import pytest

from tests.experiments import binary

NUM_STEPS = 63
BROKEN = b"PK\x03\x04 and then nothing"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return binary.Machine(tmp_path_factory.mktemp("machine"), "experiments.datasets")


@pytest.fixture(scope="module")
def mine(machine):
    path = machine.folder / "mine.npz"
    speed = np.full((NUM_STEPS, 2), 60.0)
    speed[:, 1] = [np.nan, 0.0, *[30.0] * (NUM_STEPS - 2)]
    np.savez(
        path,
        speed=speed,
        adjacency=np.array([[1, 0.5], [0, 1]]),
        start_ns=0,
        freq_ns=300 * 10**9,
    )
    return path


@pytest.fixture(scope="module")
def papers(machine):
    """A graph of three nodes, as gnn-benchmark writes it."""
    path = machine.folder / "papers.npz"
    parts = {
        "data": np.ones(2, np.float32),
        "indices": np.array([1, 0]),
        "indptr": np.array([0, 1, 2, 2]),
    }
    matrices = {f"{k}_{part}": v for k in ("adj", "attr") for part, v in parts.items()}
    shapes = {"adj_shape": np.array([3, 3]), "attr_shape": np.array([3, 2])}
    np.savez(path, **matrices, **shapes, labels=np.array([0, 1, 1]))
    return path


@pytest.fixture(scope="module")
def pictures(machine):
    path = machine.folder / "pictures.npz"
    np.savez(
        path,
        train_images=np.zeros((3, 4, 5, 3), np.uint8),
        train_labels=np.array([1, 0, 1]),
        test_images=np.zeros((1, 4, 5, 3), np.uint8),
        test_labels=np.array([1]),
        class_names=np.array(["cat", "dog"]),
    )
    return path


BAD = [
    (["--dataset=metrla"], ["metrla", "metr_la", "pems_bay"]),
    (["--dataset=pems_bay"], ["pems-bay.h5", "--download", "--data_dir"]),
    (["--dataset=broken.npz"], ["broken.npz", "not a readable"]),
    (["--download"], ["--dataset=NAME"]),
    (["--dataset=pems_bay_subset", "--download"], ["not known as a public"]),
    (["--dataset=synthetic_images", "--download"], ["not known as a public"]),
    (["--dataset=cifar10"], ["cifar-10-batches-py", "--download", "--data_dir"]),
    (["--dataset=experiments"], ["data_batch_1", "no such file"]),
    (["--dataset=cora"], ["ind.cora.graph", "--download", "--data_dir"]),
    (["--dataset=physics"], ["coauthor_physics", "ms_academic_phy.npz"]),
    (["--dataset=amazon2m", "--download"], ["not known as a public"]),
]


@pytest.fixture(scope="module")
def answers(machine, mine, papers, pictures):
    """Status, output and errors of all command lines but one, by dataset and --json."""
    folder = machine.folder
    (folder / "planetoid").mkdir()
    (folder / "planetoid" / "ind.mine.graph").write_bytes(b"")
    (folder / "broken.npz").write_bytes(BROKEN)
    made = ("synthetic_images", "synthetic_graph")
    lines = {
        (path.stem, "json"): [f"--dataset={path}", "--json"]
        for path in (mine, papers, pictures)
    }
    lines |= {name: [f"--dataset={name}"] for name in made}
    lines |= {path.stem: [f"--dataset={path}"] for path in (mine, folder / "planetoid")}
    for flags, _ in BAD:
        line = [x.replace("broken.npz", str(folder / "broken.npz")) for x in flags]
        lines[tuple(flags)] = line
    return machine.run_many(lines)


def printed(answer):
    """The output of what went well."""
    status, out, err = answer
    assert (status, err) == (0, "")
    return out


def said(answer):
    return json.loads(printed(answer))


def test_json_holds_the_statistics(answers):
    assert said(answers["mine", "json"]) == {
        "name": "mine",
        "num_nodes": 2,
        "num_edges": 3,
        "num_nonself_edges": 1,
        "num_steps": NUM_STEPS,
        "step_seconds": 300,
        "unit": "units of the data",
        "train_windows": 28,
        "validation_windows": 4,
        "test_windows": 8,
        "missing_fraction": 2 / (2 * NUM_STEPS),
        "notes": [],
    }


def test_the_table_holds_the_same(answers):
    lines = printed(answers["mine"]).splitlines()
    table = dict(line.split(maxsplit=1) for line in lines)
    assert (table["num_edges"], table["missing_fraction"]) == ("3", "0.015873")


def test_a_file_of_images_is_told_by_its_keys(answers):
    assert said(answers["pictures", "json"]) == {
        "name": "pictures",
        "train_images": 3,
        "test_images": 1,
        "image_size": "4 x 5",
        "num_classes": 2,
        "smallest_class": 1,
        "largest_class": 2,
        "class_names": ["cat", "dog"],
        "notes": [],
    }


def test_images_made_on_the_spot_as_a_table(answers):
    *rows, note = printed(answers["synthetic_images"]).splitlines()
    table = dict(row.split(maxsplit=1) for row in rows)
    assert (table["train_images"], table["smallest_class"]) == ("2000", "200")
    assert table["class_names"].startswith("striped disc, chequered disc, ")
    assert note.startswith("note: synthetic")


def test_a_file_of_nodes_is_told_by_its_keys(answers):
    statistics = said(answers["papers", "json"])
    assert (statistics["name"], statistics["num_edges"]) == ("papers", 1)
    assert statistics["class_sizes"] == [1, 2]


def test_a_folder_of_planetoid_is_told_by_its_files(answers):
    binary.assert_refused(answers["planetoid"], ["ind.mine.test.index: "])


def test_a_graph_made_on_the_spot_as_a_table(answers):
    *rows, note = printed(answers["synthetic_graph"]).splitlines()
    table = dict(row.split(maxsplit=1) for row in rows)
    assert (table["num_edges"], table["num_classes"]) == ("6000", "6")
    assert table["class_sizes"] == "500, 500, 500, 500, 500, 500"
    assert note.startswith("note: synthetic")


def test_the_listing_says_what_is_found_and_where(machine, mine, tmp_path):
    shutil.copy(mine, tmp_path / "metr_la.npz")
    result = machine.run(environment={"FEDJAX_GRAPH_DATA": str(tmp_path)})
    assert (result.returncode, result.stderr) == (0, "")
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"metr_la", "pems_bay", "pems_bay_subset", "cifar10"} <= lines.keys()
    assert {"cora", "coauthor_physics", "amazon2m", "synthetic_graph"} <= lines.keys()
    assert str(tmp_path / "metr_la.npz") in lines["metr_la"]
    assert "not found" in lines["pems_bay"]
    assert "not found" in lines["cifar10"]
    assert "made on the spot" in lines["synthetic_images"]


@pytest.mark.parametrize(("flags", "words"), BAD)
def test_bad_input_is_one_line_and_status_2(machine, answers, flags, words):
    binary.assert_refused(answers[tuple(flags)], words)
    assert answers[tuple(flags)][1] == ""
    assert (machine.folder / "broken.npz").read_bytes() == BROKEN
