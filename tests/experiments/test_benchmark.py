"""The benchmark of GraphFL at a tiny size."""

import json

from tests.experiments import binary

SIZES = (
    "--num_clients=20",
    "--meta_steps=1",
    "--chunk=1",
    "--memory_steps=1",
    "--memory_chunk=1",
    "--repeats=1",
    "--num_cpu_devices=1",
)
FORMS = ("round", "first_order_round", "checkpointed_round", "chunk_1", "chunk_all")
LOOPS = ("loop", "plain_loop")
KEYS = {
    *(f"{form}_{kind}" for form in FORMS for kind in ("s", "compile_s")),
    *(f"{loop}_s" for loop in LOOPS),
    *(f"speed_over_{loop}" for loop in LOOPS),
    "memory_1_steps_chunk_1_bytes",
    "checkpointed_memory_1_steps_chunk_1_bytes",
    *(f"fed_avg_10_clients_{steps}_steps_s" for steps in (1, 15)),
    *(f"first_layer_{kind}" for kind in ("dense_s", "sparse_s", "nonzero_share")),
    "peak_memory_bytes",
}


def test_figures_of_graphfl(tmp_path):
    machine = binary.Machine(tmp_path, "experiments.benchmark")
    process = machine.run("--system=graphfl", "--json", *SIZES)
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)
    assert set(figures) >= KEYS
    assert all(figures[key] > 0 for key in KEYS)
    assert figures["num_compilations"] == 1
    assert figures["speed_over_loop"] == figures["loop_s"] / figures["round_s"]
    assert all(figures[f"{loop}_difference"] < 1e-6 for loop in LOOPS)
