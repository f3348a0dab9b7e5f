"""A hundred thousand clients: their states in files, two hundred of them on the device.

Each client fits a line of its own, near everybody's, to sixteen points. Ditto keeps a
personal model for each; those who have taken part are scored. Started again with
`resume=True` and the same folder, the run would go on after its last round.
"""

import tempfile

import jax
import numpy as np
from own_method import LineTask, Points

import fedjax_graph as fg
from fedjax_graph.core import clients
from fedjax_graph.driver.client_store import ClientStore

NUM_CLIENTS, COHORT, NUM_ROUNDS = 100_000, 200, 10


def make_points(rng: np.random.Generator) -> Points:
    """Arrays of the host, which may as well be `np.memmap`s."""
    x = rng.normal(size=(NUM_CLIENTS, 16, 2)).astype(np.float32)
    lines = np.array([2, -1]) + 0.3 * rng.normal(size=(NUM_CLIENTS, 2))
    y = np.einsum("kmf,kf->km", x, lines).astype(np.float32) + 1
    ids = np.arange(NUM_CLIENTS, dtype=np.int32)
    return Points(x, y, ids, np.full(NUM_CLIENTS, 16, np.float32))


def main() -> None:
    method = fg.get_method("ditto")
    algorithm = method.factory(method.config_type(task=LineTask(num_features=2)))
    data, key = make_points(np.random.default_rng(0)), jax.random.key(0)
    with tempfile.TemporaryDirectory() as folder:
        store = ClientStore(algorithm, data, key, folder)
        seen = set()
        while store.num_rounds < NUM_ROUNDS:
            round_key = jax.random.fold_in(key, store.num_rounds)
            cohort = clients.draw_indices(round_key, store.num_clients, COHORT)
            store.round(cohort, round_key)
            seen.update(cohort.tolist())
        others = np.setdiff1d(np.arange(2 * COHORT), sorted(seen))[:COHORT]
        for name, indices in ("cohorts", sorted(seen)[:COHORT]), ("others", others):
            scores = algorithm.evaluate(*store.gather(np.array(indices)))
            print(f"{name}: mean squared error {scores['loss']:.3f}")


if __name__ == "__main__":
    main()
