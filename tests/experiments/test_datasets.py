"""The binary as a user runs it: a process, its output and its exit status."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

NUM_STEPS = 63


def run(*flags, **environment):
    inherited = {k: v for k, v in os.environ.items() if k != "FEDJAX_GRAPH_DATA"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "experiments.datasets", *flags],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.npz"
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


@pytest.fixture
def pictures(tmp_path):
    path = tmp_path / "pictures.npz"
    np.savez(
        path,
        train_images=np.zeros((3, 4, 5, 3), np.uint8),
        train_labels=np.array([1, 0, 1]),
        test_images=np.zeros((1, 4, 5, 3), np.uint8),
        test_labels=np.array([1]),
        class_names=np.array(["cat", "dog"]),
    )
    return path


def test_json_holds_the_statistics(mine):
    result = run(f"--dataset={mine}", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
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


def test_the_table_holds_the_same(mine):
    result = run(f"--dataset={mine}")
    assert result.returncode == 0
    table = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert (table["num_edges"], table["missing_fraction"]) == ("3", "0.015873")


def test_a_file_of_images_is_told_by_its_keys(pictures):
    result = run(f"--dataset={pictures}", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
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


def test_images_made_on_the_spot_as_a_table():
    result = run("--dataset=synthetic_images")
    assert (result.returncode, result.stderr) == (0, "")
    *rows, note = result.stdout.splitlines()
    table = dict(row.split(maxsplit=1) for row in rows)
    assert (table["train_images"], table["smallest_class"]) == ("2000", "200")
    assert table["class_names"].startswith("striped disc, chequered disc, ")
    assert note.startswith("note: synthetic")


@pytest.fixture
def papers(tmp_path):
    """A graph of three nodes, as gnn-benchmark writes it."""
    path = tmp_path / "papers.npz"
    parts = {
        "data": np.ones(2, np.float32),
        "indices": np.array([1, 0]),
        "indptr": np.array([0, 1, 2, 2]),
    }
    matrices = {f"{k}_{part}": v for k in ("adj", "attr") for part, v in parts.items()}
    shapes = {"adj_shape": np.array([3, 3]), "attr_shape": np.array([3, 2])}
    np.savez(path, **matrices, **shapes, labels=np.array([0, 1, 1]))
    return path


def test_a_file_of_nodes_is_told_by_its_keys(papers):
    result = run(f"--dataset={papers}", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    statistics = json.loads(result.stdout)
    assert (statistics["name"], statistics["num_edges"]) == ("papers", 1)
    assert statistics["class_sizes"] == [1, 2]


def test_a_folder_of_planetoid_is_told_by_its_files(tmp_path):
    (tmp_path / "ind.mine.graph").write_bytes(b"")
    result = run(f"--dataset={tmp_path}")
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert "ind.mine.test.index: " in line


def test_a_graph_made_on_the_spot_as_a_table():
    result = run("--dataset=synthetic_graph")
    assert (result.returncode, result.stderr) == (0, "")
    *rows, note = result.stdout.splitlines()
    table = dict(row.split(maxsplit=1) for row in rows)
    assert (table["num_edges"], table["num_classes"]) == ("6000", "6")
    assert table["class_sizes"] == "500, 500, 500, 500, 500, 500"
    assert note.startswith("note: synthetic")


def test_the_listing_says_what_is_found_and_where(mine):
    folder = mine.parent
    mine.rename(folder / "metr_la.npz")
    cache = str(folder / "cache")
    result = run(FEDJAX_GRAPH_DATA=str(folder), FEDJAX_GRAPH_CACHE=cache)
    assert (result.returncode, result.stderr) == (0, "")
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"metr_la", "pems_bay", "pems_bay_subset", "cifar10"} <= lines.keys()
    assert {"cora", "coauthor_physics", "amazon2m", "synthetic_graph"} <= lines.keys()
    assert str(folder / "metr_la.npz") in lines["metr_la"]
    assert "not found" in lines["pems_bay"]
    assert "not found" in lines["cifar10"]
    assert "made on the spot" in lines["synthetic_images"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
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
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, flags, words):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 and then nothing")
    flags = [flag.replace("broken.npz", str(broken)) for flag in flags]
    result = run(*flags, FEDJAX_GRAPH_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words)
    assert broken.read_bytes() == b"PK\x03\x04 and then nothing"
