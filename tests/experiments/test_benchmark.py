"""The benchmarks of the four systems at a tiny size."""

import dataclasses
import functools
import json

import pytest

from experiments.benchmark import BenchmarkStudy
from experiments.benchmarks import cnfgnn, measure, sfl
from fedjax_graph.core.errors import InputError
from tests.experiments import binary

COMMON = ("--shape=tiny", "--repeats=1")
DEVICES = {"graphfl": 2}  # whose loops are run on the first alone
COMMAND_LINES = {
    "cnfgnn": ("--client_steps=1", "--server_steps=1"),
    "sfl": (
        "--models=8",
        "--parameters=100",
        "--image_clients=2",
        "--image_batch=4",
        "--image_width=2",
    ),
    "graphfl": (
        "--num_clients=20",
        "--meta_steps=1",
        "--chunk=1",
        "--memory_steps=1",
        "--memory_chunk=1",
    ),
    "clients": (
        "--client_counts=8",
        "--client_counts=20",
        "--cohort=8",
        "--cohort_rounds=2",
        "--client_parts=plain_vmap,ditto,ditto_in_files",
    ),
    "fl_agcns": ("--search_population=4", "--search_steps=1", "--search_codes=2"),
    "start": ("--starts=cnfgnn",),
}
FORMS = ("round", "first_order_round", "checkpointed_round", "chunk_1", "chunk_all")
LOOPS = ("loop", "plain_loop")
KEYS = {
    "start": {"cnfgnn_cold_s", "cnfgnn_warm_s", "cnfgnn_warm_round_s"},
    "cnfgnn": {
        *(f"client{form}_windows_per_s" for form in ("", "_vmap", "_loop")),
        *("client_compile_s", "server_step_s", "server_compile_s", "compile_s"),
        *("matmul_flops_per_s", "flops_utilisation", "server_flops_utilisation"),
    },
    "sfl": {
        *(f"{name}_s" for name in ("graph_convolution", "weighted_mean", "distances")),
        *("copy_bound_s", "product_bound_s", "aggregation_share_of_bound"),
        *("aggregation_peak_memory_bytes", "round_compile_s"),
        *("round_images_per_s", "loop_images_per_s", "speed_over_loop"),
    },
    "graphfl": {
        *(f"{form}_{kind}" for form in FORMS for kind in ("s", "compile_s")),
        *(f"{loop}_s" for loop in LOOPS),
        *(f"speed_over_{loop}" for loop in LOOPS),
        "memory_1_steps_chunk_1_bytes",
        "checkpointed_memory_1_steps_chunk_1_bytes",
        *(f"fed_avg_10_clients_{steps}_steps_s" for steps in (1, 15)),
        *(f"first_layer_{kind}" for kind in ("dense_s", "sparse_s", "nonzero_share")),
        "peak_memory_bytes",
    },
    "clients": {
        f"{figure}_{num_clients}"
        for num_clients in (8, 20)
        for figure in (
            *("plain_vmap_us", "ditto_us", "ditto_in_files_us", "ditto_pass_us"),
            *("data_mib", "models_mib"),
        )
    },
    "fl_agcns": {
        *("generation_s", "generation_compile_s", "network_compile_s"),
        *("supernet_step_s", "scoring_s", "loop_s", "speed_over_loop"),
        *("scores_per_s", "loop_scores_per_s", "peak_memory_bytes"),
    },
}


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """What a system's benchmark prints, run once."""

    @functools.cache
    def run(system):
        machine = binary.Machine(
            tmp_path_factory.mktemp("benchmark"), "experiments.benchmark"
        )
        devices = f"--num_cpu_devices={DEVICES.get(system, 1)}"
        flags = (f"--system={system}", "--json", devices, *COMMON)
        process = machine.run(*flags, *COMMAND_LINES[system])
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return run


def cases(*systems):
    """All but that of many clients are slow: they compile for long."""
    return pytest.mark.parametrize(
        "system",
        [
            pytest.param(name, marks=[] if name == "clients" else [pytest.mark.slow])
            for name in systems
        ],
    )


@cases(*COMMAND_LINES)
def test_every_figure_is_there(figures, system):
    entry = figures(system)
    assert entry["system"] == system
    assert set(entry) >= KEYS[system]
    assert all(entry[key] > 0 for key in KEYS[system])


@cases("graphfl", "fl_agcns")
def test_rounds_compile_once(figures, system):
    assert figures(system)["num_compilations"] == 1


@pytest.mark.slow
def test_loops_over_clients_end_with_the_same_parameters(figures):
    assert all(figures("graphfl")[f"{loop}_difference"] < 1e-6 for loop in LOOPS)


@pytest.mark.slow
def test_graphfls_ratio_is_of_the_figures_beside_it(figures):
    graphfl = figures("graphfl")
    assert graphfl["speed_over_loop"] == graphfl["loop_s"] / graphfl["round_s"]


@pytest.mark.slow
def test_sfls_ratio_is_of_the_figures_beside_it(figures):
    sfl = figures("sfl")
    speed = sfl["round_images_per_s"] / sfl["loop_images_per_s"]
    assert sfl["speed_over_loop"] == speed


@pytest.mark.slow
def test_the_shape_and_compilations_of_cnfgnn_are_there(figures):
    cnfgnn = figures("cnfgnn")
    assert cnfgnn["shape"] == "tiny"
    assert cnfgnn["compile_s"] >= cnfgnn["client_compile_s"]


@pytest.mark.parametrize("line", ["hello", "{}", "[1]", "5"])
def test_a_peer_of_cnfgnn_that_prints_something_else_is_one_line(tmp_path, line):
    script = tmp_path / "peer.py"
    script.write_text(f"print({line!r})")
    settings = BenchmarkStudy(system="cnfgnn", peer=True, peer_script=str(script))
    with pytest.raises(InputError, match="peer.py prints no last line of JSON with"):
        cnfgnn.peer_measure(settings, 5, 8)()


def test_a_peer_of_images_is_run_and_its_best_rate_taken(tmp_path):
    script = tmp_path / "peer.py"
    settings = BenchmarkStudy(system="sfl", peer=True, peer_script=str(script))
    script.write_text(
        "import sys; print(sys.argv[1:], '1.5 images/s\\nor 12.5 images/s')"
    )
    rates = sfl.peer_measure(settings, 8, 16, 100)
    assert rates == {"peer_images_per_s": 12.5}
    assert measure.peer_output(settings, ["8", "16"]).startswith("['8', '16']")
    for text, words in (
        ("print('torch')", "prints no images/s"),
        ("raise SystemExit('no torch here')", "failed: no torch here"),
    ):
        script.write_text(text)
        with pytest.raises(InputError, match=words):
            sfl.peer_measure(settings, 8, 16, 100)
    lost = dataclasses.replace(settings, peer_python=str(tmp_path / "python"))
    with pytest.raises(InputError, match="--peer_python=.*No such file"):
        sfl.peer_measure(lost, 8, 16, 100)
