"""What the doctor says of installations that are well and of those that are not."""

import hashlib
import os
import subprocess
import sys
from importlib import metadata

import pytest

from fedjax_graph import doctor
from fedjax_graph.core import mesh
from fedjax_graph.data import download
from fedjax_graph.data.download import Source


def problems(findings):
    return {x.subject: x for x in findings if x.remedy is not None}


def test_a_sound_installation_has_no_problem(tmp_path, capsys, monkeypatch):
    """Whatever else this machine has: a GPU that is not used, files of a user's."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path / "cache"))
    assert doctor.main([f"--data_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 problems found"
    assert all(line.startswith("ok ") for line in lines[:-1])
    for said in ("Python", "fedjax_graph", "jaxlib", "devices", "compiler", "metr_la"):
        assert any(said in line for line in lines), said


@pytest.mark.parametrize(
    ("versions", "subject", "remedy"),
    [
        ({"jax": "0.11.1", "flax": "0.12.9"}, "jax 0.11.1 with flax 0.12.9", "-U"),
        ({"jax": "0.11.0", "flax": "0.12.9"}, None, None),
        ({"jax": "0.11.1", "flax": "0.12.10"}, None, None),
        (
            {"jax-cuda13-plugin": "0.10.1", "jaxlib": "0.10.2"},
            "jax-cuda13-plugin 0.10.1 with jaxlib 0.10.2",
            "jax-cuda13-plugin==0.10.2",
        ),
        ({"optax": "0.1"}, "optax", "optax>="),
        ({"optax": None}, "optax", "optax>="),
    ],
)
def test_versions_that_do_not_fit_are_told(monkeypatch, versions, subject, remedy):
    own = metadata.version

    def version(name):
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or own(name)

    monkeypatch.setattr(metadata, "version", version)
    found = problems(doctor.check_versions())
    assert list(found) == ([subject] if subject else [])
    if subject:
        assert remedy in found[subject].remedy


def test_a_gpu_that_jax_does_not_see_is_told(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if mesh.backend() != "cpu":
        pytest.skip("JAX sees it")
    (found,) = problems(doctor.check_devices()).values()
    assert "fedjax-graph[cuda]" in found.remedy
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS" in problems(doctor.check_devices())["GPU"].remedy


def test_digests_of_files_are_compared_where_they_are_known(tmp_path, monkeypatch):
    content = b"published"
    source = Source("pems04.npz", (), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(download, "REGISTRY", {"pems_d4": ((source,),)})
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pems_d4.npz").touch()

    def said():
        found = doctor.check_data(str(tmp_path))
        return next(x for x in found if x.subject == "data pems_d4")

    assert said().text().endswith("pems_d4.npz; pems_d4.npz not checked")
    path = tmp_path / "PEMS04" / "pems04.npz"
    path.parent.mkdir()
    path.write_bytes(content)
    assert "digests right of 1 published files" in said().said
    path.write_bytes(b"damaged")
    assert "is not the published file (sha256" in said().said
    assert "--dataset=pems_d4 --download" in said().remedy


def test_what_breaks_while_it_is_looked_at_is_a_problem(monkeypatch, capsys):
    def broken():
        raise ImportError("no such symbol\nin the library")

    monkeypatch.setattr(doctor, "check_compiler", broken)
    assert doctor.main(["--data_dir=/no/such/folder"]) == 1
    out = capsys.readouterr().out
    assert (
        "problem  compiler: cannot be looked at: ImportError: no such symbol in" in out
    )
    assert "problem  data: " in out and "/no/such/folder" in out
    assert out.endswith("2 problems found\n") and out.count("\n         -> ") == 2


def test_a_disk_that_is_full_or_not_ours_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path / "a" / "b"))
    assert not problems(doctor.check_disk())
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert "GiB left" in problems(doctor.check_disk())["cache folder"].said
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "not writable" in problems(doctor.check_disk())["cache folder"].said


def test_output_that_nobody_reads_ends_in_one_line():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "fedjax_graph.doctor"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    said = "error: nobody reads the output any more\n"
    assert (process.returncode, process.stderr) == (141, said)
