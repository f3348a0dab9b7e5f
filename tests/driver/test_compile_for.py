"""Runs compiled for chips that are not here, and rounds exported for any."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import compile_for, hlo_costs, memory, rounds
from tests.algorithms.problems import Nodes, Seq2SeqTraffic, Subgraphs, Traffic
from tests.algorithms.tiny_methods import TINY

SMALL = {  # command lines whose rounds compile in seconds
    "cnfgnn": (
        "--num_sensors=8",
        "--num_days=2",
        "--hidden_size=64",  # of smaller minibatches XLA makes one sum
        "--gn_mlp_sizes=8,8",
        "--gn_layers=1",
        "--methods=cnfgnn",
    ),
    "sfl": (
        "--dataset=synthetic",
        "--num_sensors=6",
        "--num_days=2",
        "--rnn_hidden_size=8",
        "--methods=sfl",
    ),
    "graphfl": ("--methods=graphfl",),
    "fl_agcns": ("--methods=gcn",),
    "fl_agcns_search": ("--methods=fl_agcns",),  # whose fitness is from scratch
}
COLLECTIVES = {  # what the design says
    "cnfgnn": {"all-to-all", "reduce-scatter", "all-reduce"},  # h_G, h_c, gradients
    "sfl": {"all-to-all", "all-reduce"},  # models, mixed by columns, and their mean
    "graphfl": {"all-gather", "all-reduce"},
    "fl_agcns": {"all-reduce"},  # a mean of gradients
    "fl_agcns_search": {"all-reduce"},  # of codes' gradients, and scores
}
MOVES = {"all-to-all", "reduce-scatter"}  # of hidden states, or of mixed models


@pytest.mark.parametrize(
    ("text", "platform", "topology", "backend"),
    [
        ("h200x8", "cuda", "1x1x8", "gpu"),
        ("h100x1", "cuda", "1x1x1", "gpu"),
        ("v5e:16x16", "tpu", "v5e:16x16", "tpu"),
        ("v5p:2x2x2", "tpu", "v5p:2x2x2", "tpu"),
    ],
)
def test_targets(text, platform, topology, backend):
    target = compile_for.parse(text)
    assert (target.chip.platform, target.topology) == (platform, topology)
    assert target.backend == backend


class Lowered:
    """A program that XLA cannot compile with Triton, or at all."""

    def __init__(self, said):
        self.said = said

    def compile(self, compiler_options=None):
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError(self.said)
        return compiler_options


def test_products_that_triton_cannot_do_are_left_to_cublas():
    lowered = Lowered("INTERNAL: Couldn't find output tile sizes that satisfy hlo")
    compiled, has_triton = compile_for._compile(lowered, compile_for.parse("h200x1"))
    assert compiled == {"xla_gpu_enable_triton_gemm": False} and not has_triton
    for said, chips in ((lowered.said, "v5e:2x2"), ("out of memory", "h200x1")):
        with pytest.raises(jax.errors.JaxRuntimeError):
            compile_for._compile(Lowered(said), compile_for.parse(chips))


@pytest.mark.parametrize(
    "text",
    [
        "h200",
        "x8",
        "h200:2x2",
        "v5ex4",
        "v5e",
        "v9e:2x2",
        "h200x",
        "h200x00",
        "v5e:02x2",
        "",
    ],
)
def test_what_is_no_target_is_refused(text):
    with pytest.raises(InputError, match=f"compile_for={text}: expected a chip .*v5e"):
        compile_for.parse(text)


def test_gpus_of_several_machines_are_refused():
    with pytest.raises(InputError, match="compile_for=h200x9: expected at most 8 GPUs"):
        compile_for.parse("h200x9")


def test_rates_have_a_source_and_an_order():
    for name, chip in compile_for.CHIPS.items():
        assert name in chip.source.lower().replace("tpu ", "")
        rates = chip.rates()
        types = ("bf16", "f32_default", "f32_high", "f32_highest")
        falling = [*map(rates.flops, types), rates.bytes, rates.link_bytes]
        assert falling == sorted(falling, reverse=True)


@pytest.mark.usefixtures("rolled_scans")
@pytest.mark.parametrize("seeds", [pytest.param((3,), marks=pytest.mark.slow), (3, 4)])
def test_what_is_compiled_is_the_program_of_a_run(train, monkeypatch, seeds):
    """Of four devices that are here, whose program of a run is the reference."""
    devices, programs = jax.devices()[:4], []
    rates = dict.fromkeys(("default", "high", "highest"), 1e12)
    monkeypatch.setattr(compile_for.Target, "devices", lambda target: devices)
    monkeypatch.setattr(memory, "check_program", lambda _, x: programs.append(x))
    chip = compile_for.Chip("cpu", 2e12, rates, 1e11, 1e10, 16, "nobody's")
    values = TINY[Traffic]["sfl_star"]
    algorithm = get_method("sfl_star").factory(make_config("sfl_star", values))
    data = Traffic(train).train
    fewer = data._replace(starts=data.starts[:7])
    splits = {"train": data, "validation": fewer, "test": fewer}
    config = rounds.RunConfig(1, seeds=seeds)
    target = compile_for.Target("four cores", chip, "")
    report = compile_for.compile_round(algorithm, splits, config, target)
    assert jax.sharding.get_mesh().empty and not programs
    with jax.set_mesh(mesh.make_mesh(devices=devices)):
        rounds.run("sfl_star", algorithm, splits, config)
    needed = programs[0].memory_analysis()
    costs = hlo_costs.analyse(programs[0].as_text(), chip.rates())
    both = set(map(id, jax.tree.leaves(data))) & set(map(id, jax.tree.leaves(fewer)))
    assert id(data.speed) in both  # of whose clients, 5 of 8 places, each device has 2
    shared = sum(
        x.nbytes * (2 / len(x) if x is data.speed else 1)
        for x in jax.tree.leaves(data)
        if id(x) in both
    )
    arguments = needed.argument_size_in_bytes - shared
    assert 0 < arguments == report.argument_gib * compile_for.GIB
    assert report.temporary_gib * compile_for.GIB == needed.temp_size_in_bytes
    assert (report.devices, report.collectives) == (4, costs.collectives)
    assert report.roofline_s == costs.seconds > 0


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(x, marks=pytest.mark.slow) if x == "fl_agcns_search" else x
        for x in SMALL
    ],
)
def test_a_round_compiles_for_a_tpu(tmp_path, system):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, of the extra [tpu], is missing")
    binary = system.removesuffix("_search")
    command = [sys.executable, "-m", f"experiments.{binary}", *SMALL[system]]
    done = subprocess.run(
        [*command, "--compile_for=v5e:2x2", f"--workdir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "run").exists()
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["chip"], report["devices"]) == ("v5e:2x2", 4)
    assert report["host_transfers"] == 0
    found = set(report["collectives"])
    assert found >= COLLECTIVES[system]
    assert found & MOVES == COLLECTIVES[system] & MOVES
    assert 0 < report["temporary_gib"] < 1 and report["flops"] > 0
    assert report["roofline_s"] > 0 and report["compile_s"] > 0


def test_without_a_compiler_the_extra_is_named():
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is here")
    with pytest.raises(InputError, match=r"compile_for=v5e:2x2: .*fedjax-graph\[tpu\]"):
        compile_for.parse("v5e:2x2").devices()


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        pytest.param("cnfgnn", Traffic, marks=pytest.mark.slow),
        ("fed_avg", Seq2SeqTraffic),
        ("sfl_star", Traffic),
        ("graphfl", Nodes),
        ("fed_sgd", Subgraphs),
        pytest.param("fl_agcns", Subgraphs, marks=pytest.mark.slow),
    ],
)
def test_a_round_is_exported_for_all_platforms(train, method, problem):
    """From one source; nothing is compiled."""
    data = (problem(train) if problem in (Traffic, Seq2SeqTraffic) else problem()).train
    values = TINY[problem][method]
    algorithm = get_method(method).factory(make_config(method, values))
    state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    exported = jax.export.export(
        jax.jit(algorithm.round), platforms=("cpu", "cuda", "tpu")
    )(state, data, jax.random.key(0))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    after, _ = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    assert jax.tree.structure(after) == jax.tree.structure(state)
