"""One device or several: the same numbers, the same bytes, one program.

The number of devices is fixed once JAX has started, so each case is a process.
"""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import mesh

PROGRAM = """
import json, sys
from fedjax_graph.core import mesh
mesh.use_cpu_cores(int(sys.argv[1]))
import jax, jax.numpy as jnp, numpy as np
from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.data.traffic import synthetic, windows
from fedjax_graph.driver import rounds

scan = jax.lax.scan  # not unrolled: quicker to compile
jax.lax.scan = lambda *args, unroll=1, **named: scan(*args, **named)
jax.config.update("jax_disable_most_optimizations", True)
assert jax.device_count() == int(sys.argv[1])
splits = windows.make_splits(synthetic.traffic_network(num_sensors=5, num_days=1))
small = {"hidden_size": 4, "gn_mlp_sizes": (4, 4, 4), "gn_layers": 1}
small |= {"client_batch_size": 50, "server_batch_size": 47}
task = {"kind": "traffic_rnn", "hidden_size": 4, "batch_size": 50}
seq2seq = task | {"kind": "traffic_seq2seq"}
runs = {
    "cnfgnn": small | {"clients_per_chunk": 1},
    "fed_avg": {"task": seq2seq, "clients_per_chunk": 2, "participation": 0.6},
    "gru_centralized": {"task": seq2seq},
    "persistence": {},
    "scaffold": {"task": task, "participation": 0.6},
    "sfl_star": {"task": task},
}
trained = ("cnfgnn", "fed_avg", "gru_centralized")
out = {}
for method, values in runs.items():
    algorithm = get_method(method).factory(make_config(method, values))
    config = rounds.RunConfig(
        num_rounds=2 if method in trained else 0,
        seeds=(0, 1),
        seeds_per_chunk=1,
    )
    result = rounds.run(method, algorithm, splits, config)
    forecast = jax.jit(algorithm.predict)(
        jax.tree.map(lambda x: x[0], result.best_state), splits["test"]
    )
    out[method] = {
        "rmse": result.test["rmse"].tolist(),
        "loss": result.test["loss"].tolist(),
        "forecast": np.asarray(forecast)[::9].ravel().tolist(),
        "bytes": result.communication,
        "programs": rounds._advance_seeds._cache_size(),
    }
row = jnp.arange(5.0)
double = mesh.concat_parts(lambda x, shared: x * shared)
out["concat"] = jax.jit(lambda: double(row, shared=(2.0,)))().tolist()
total = mesh.sum_parts(lambda x, y: jnp.sum(x * y), in_axes=(0, None))
out["sum"] = float(jax.jit(lambda: total(jnp.arange(6.0), 2.0))())
print(json.dumps(out))
"""


def run_on(num_devices):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(num_devices)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_one():
    return run_on(1)


@pytest.mark.parametrize("num_devices", [3])  # does not divide the 5 clients
def test_results_do_not_depend_on_the_number_of_devices(on_one, num_devices):
    several = run_on(num_devices)
    for method in several.keys() - {"scaffold", "sfl_star", "concat", "sum"}:
        for key in ("rmse", "loss", "forecast"):
            npt.assert_allclose(
                several[method][key], on_one[method][key], rtol=1e-4, err_msg=method
            )
        assert several[method]["bytes"] == on_one[method]["bytes"]
        assert several[method]["programs"] == on_one[method]["programs"]
    assert several["concat"] == on_one["concat"] == [0, 2, 4, 6, 8]
    assert several["sum"] == on_one["sum"] == 30


def test_one_device_is_the_plain_call():
    if jax.device_count() > 1:
        pytest.skip("this process has several devices")
    assert mesh.padded_size(5) == 5
    assert mesh.sum_parts(fn := lambda x: x, in_axes=(0,)) is fn
    rows = jnp.arange(3)
    npt.assert_array_equal(mesh.concat_parts(fn)(rows), np.arange(3))
    assert mesh.replicated(rows) is rows


APART = """
from fedjax_graph.core import mesh
mesh.use_cpu_cores(2)
import jax, jax.numpy as jnp

def work(counts):
    step = lambda i, x: jnp.sin(x) + 1e-3
    return jax.lax.fori_loop(0, counts[0], step, jnp.ones(2000))

total = mesh.sum_parts(work, in_axes=(0,))
print(jax.jit(total)(jnp.array([1, 50_000_000]))[0])
"""


@pytest.mark.slow
def test_a_device_waits_for_another_longer_than_xla_does():
    """XLA's limit is 40 seconds, after which it aborts the process."""
    start = time.monotonic()
    command = [sys.executable, "-c", APART]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert time.monotonic() - start > 45
