"""OpenFGL's own trainer on the subgraphs of `experiments.subgraphs`, for the notes.

Run by hand, in two halves. The first needs this package, the second OpenFGL and torch
(versions: see `openfgl_golden.py`):

    python tests/algorithms/openfgl_runs.py deal FILE --dataset=cora --partition=metis
    python tests/algorithms/openfgl_runs.py run FILE OUTPUT [METHOD ...]

`deal` writes a graph, whose nodes belong to which client, and its labels' split. `run`
trains each method by OpenFGL's defaults (100 rounds of 3 epochs, the round of the best
validation accuracy) on one thread, with a seed, and adds a line of JSON to OUTPUT: test
accuracy in percent, the round, and the median seconds of a round with its evaluation,
of all and of the last five, which are of AdaFGL's second phase.
Methods with one model for everybody are scored by the server's, the others by each
client's. What of OpenFGL was changed so that it runs stands in `openfgl_changes.py`;
with `--sparse_features` it multiplies them as sparse arrays, and its seconds are not
its own.
"""

import argparse
import contextlib
import io
import json
import pathlib
import pickle
import statistics
import sys
import tempfile
import time
from unittest import mock

import numpy as np
import scipy.sparse

METHODS = {  # OpenFGL's name of each, and whether the server's model is scored
    "local": ("isolate", False),
    "fed_avg": ("fedavg", True),
    "fed_prox": ("fedprox", True),
    "scaffold": ("scaffold", True),
    "moon": ("moon", True),
    "fed_dc": ("feddc", True),
    "fed_proto": ("fedproto", False),
    "fed_gta": ("fedgta", False),
    "fed_pub": ("fedpub", False),
    "gcfl_plus": ("gcfl_plus", False),
    "fgssl": ("fgssl", True),
    "ada_fgl": ("adafgl", False),
    "fed_sage_plus": ("fedsage_plus", False),
}
HIDDEN_SIZE, NUM_LAYERS, DROPOUT = 64, 2, 0.5
SPLITS = ("train", "val", "test")


def deal(path: pathlib.Path, **options: str) -> None:
    """Writes the graph, its clients and its split as the study of `options` has it."""
    from experiments.studies.subgraphs import SubgraphStudy
    from experiments.studies.subgraphs_problem import make_problem

    problem = make_problem(SubgraphStudy(**options))
    dataset, split = problem.dataset, problem.split
    features = scipy.sparse.csr_array(dataset.features)
    np.savez(
        path,
        values=features.data,
        columns=features.indices,
        rows=features.indptr,
        num_features=features.shape[1],
        edges=np.asarray(dataset.edges),
        labels=dataset.labels,
        owners=problem.parts.owners,
        train=split.train,
        val=split.validation,
        test=split.test,
    )


class Clients:
    """What OpenFGL's trainer reads of a dataset, of what `deal` wrote."""

    def __init__(self, path: pathlib.Path, folder: pathlib.Path) -> None:
        with np.load(path) as kept:
            arrays = dict(kept)
        shape = len(arrays["labels"]), int(arrays["num_features"])
        names = ("values", "columns", "rows")
        self._features = scipy.sparse.csr_array(
            tuple(arrays[name] for name in names), shape
        )
        self._arrays = arrays
        self.num_clients = int(arrays["owners"].max()) + 1
        self.processed_dir = str(folder)
        nodes = [np.flatnonzero(arrays["owners"] == k) for k in range(self.num_clients)]
        self.local_data = [self._graph(own) for own in nodes]
        self.global_data = self._graph(np.arange(len(arrays["labels"])))
        split = folder / "node_cls" / "default_split"
        split.mkdir(parents=True)
        for k, own in enumerate(nodes):
            self._write_split(split, k, own)

    def _graph(self, nodes: np.ndarray):
        import torch
        from torch_geometric.data import Data

        place = np.full(len(self._arrays["labels"]), -1)
        place[nodes] = np.arange(len(nodes))
        edges = place[self._arrays["edges"]]  # [E, 2]
        edges = edges[(edges >= 0).all(1) & (edges[:, 0] != edges[:, 1])]
        edges = np.unique(np.concatenate([edges, edges[:, ::-1]]), axis=0)
        data = Data(
            x=torch.tensor(self._features[nodes].toarray(), dtype=torch.float32),
            edge_index=torch.tensor(edges.T.copy(), dtype=torch.int64),
            y=torch.tensor(self._arrays["labels"][nodes], dtype=torch.int64),
        )
        data.num_global_classes = int(self._arrays["labels"].max()) + 1
        data.global_map = dict(enumerate(nodes.tolist()))
        return data

    def _write_split(self, folder: pathlib.Path, k: int, nodes: np.ndarray) -> None:
        import torch

        for name in SPLITS:
            is_in = np.isin(nodes, self._arrays[name])
            torch.save(torch.tensor(is_in), folder / f"{name}_{k}.pt")
            own = pickle.dumps(nodes[is_in].tolist())
            (folder / f"glb_{name}_{k}.pkl").write_bytes(own)


# --- Runs -----------------------------------------------------------------------------


def change(method: str, data) -> None:
    """Has OpenFGL run a method that it does not run as it is."""
    import openfgl_changes
    from openfgl.model.gcn import GCN

    def network():
        sizes = data.x.shape[1], HIDDEN_SIZE, data.num_global_classes, NUM_LAYERS
        return GCN(*sizes, DROPOUT)

    if method in ("fed_pub", "fgssl"):
        openfgl_changes.without_torch_scatter()
    elif method == "ada_fgl":
        openfgl_changes.with_scipys_product()
        openfgl_changes.with_unlabelled_nodes()
    elif method == "gcfl_plus":
        openfgl_changes.with_network(network)


def run_one(
    path: pathlib.Path, method: str, seed: int, num_rounds: int, sparse_features: bool
) -> dict:
    """Trains one method and returns its line."""
    import openfgl_changes
    import torch

    with mock.patch.object(sys, "argv", sys.argv[:1]):  # which OpenFGL reads
        from openfgl.config import args
        from openfgl.flcore import trainer
        from openfgl.utils.basic_utils import seed_everything
    torch.set_num_threads(1)
    name, is_servers = METHODS[method]
    scored = "global" if is_servers else "local"
    with tempfile.TemporaryDirectory() as folder:
        clients = Clients(path, pathlib.Path(folder))
        change(method, clients.global_data)
        own = dict(
            fl_algorithm=name,
            dataset=["Cora"],
            model=["gcn"],
            metrics=["accuracy"],
            evaluation_mode=f"{scored}_model_on_local_data",
            num_clients=clients.num_clients,
            num_rounds=num_rounds,
            seed=seed,
            root=folder,
            use_cuda=False,
        )
        options = argparse.Namespace(**vars(args) | own)
        seed_everything(seed)
        torch.use_deterministic_algorithms(False)
        stamps = []

        def evaluate(self, inner=trainer.FGLTrainer.evaluate):
            inner(self)
            stamps.append(time.perf_counter())

        width = clients.global_data.x.shape[1]
        with (
            openfgl_changes.with_sparse_features(width)
            if sparse_features
            else contextlib.nullcontext(),
            mock.patch.object(trainer, "FGLDataset", lambda _: clients),
            mock.patch.object(trainer.FGLTrainer, "evaluate", evaluate),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            run = trainer.FGLTrainer(options)
            start = time.perf_counter()
            run.train()
    best, seconds = run.evaluation_result, np.diff([start, *stamps])
    return {
        "method": method,
        "seed": seed,
        "num_rounds": num_rounds,
        "accuracy": 100 * best["best_test_accuracy"],
        "validation_accuracy": 100 * best["best_val_accuracy"],
        "best_round": best["best_round"] + 1,
        "seconds_per_round": statistics.median(seconds.tolist()),
        "seconds_of_last_rounds": statistics.median(seconds[-5:].tolist()),
        "seconds": float(seconds.sum()),
    }


def run(
    path: pathlib.Path, output: pathlib.Path, methods, seeds, num_rounds, **options
) -> None:
    """Runs what OUTPUT does not have yet."""
    lines = output.read_text().splitlines() if output.exists() else []
    done = {(x["method"], x["seed"], x["num_rounds"]) for x in map(json.loads, lines)}
    for method in methods or METHODS:
        for seed in seeds:
            if (method, seed, num_rounds) in done:
                continue
            line = json.dumps(run_one(path, method, seed, num_rounds, **options))
            with output.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    halves = parser.add_subparsers(required=True, dest="half")
    first = halves.add_parser("deal")
    first.add_argument("path", type=pathlib.Path)
    first.add_argument("--dataset", required=True)
    first.add_argument("--partition", default="louvain")
    second = halves.add_parser("run")
    second.add_argument("path", type=pathlib.Path)
    second.add_argument("output", type=pathlib.Path)
    second.add_argument("methods", nargs="*", metavar="METHOD", choices=list(METHODS))
    second.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    second.add_argument("--num_rounds", type=int, default=100)
    second.add_argument("--sparse_features", action="store_true")
    args = parser.parse_args()
    if args.half == "deal":
        deal(args.path, dataset=args.dataset, partition=args.partition)
    else:
        given = {name: x for name, x in vars(args).items() if name != "half"}
        run(**given)


if __name__ == "__main__":
    main()
