"""The benchmarks of the four systems at a tiny size."""

import json

import pytest

from tests.experiments import binary

COMMON = ("--shape=tiny", "--repeats=1", "--num_cpu_devices=1")
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
    "fl_agcns": ("--search_population=4", "--search_steps=1", "--search_codes=2"),
}
FORMS = ("round", "first_order_round", "checkpointed_round", "chunk_1", "chunk_all")
LOOPS = ("loop", "plain_loop")
KEYS = {
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
    "fl_agcns": {
        *("generation_s", "generation_compile_s", "network_compile_s"),
        *("supernet_step_s", "scoring_s", "loop_s", "speed_over_loop"),
        *("scores_per_s", "loop_scores_per_s", "peak_memory_bytes"),
    },
}


SLOW = ("graphfl", "fl_agcns")


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in COMMAND_LINES
    ],
)
def test_every_figure_is_there(tmp_path, system):
    machine = binary.Machine(tmp_path, "experiments.benchmark")
    flags = (f"--system={system}", "--json", *COMMON, *COMMAND_LINES[system])
    process = machine.run(*flags)
    assert process.returncode == 0, process.stderr
    entry = json.loads(process.stdout)
    assert entry["system"] == system
    assert set(entry) >= KEYS[system]
