"""Golden numbers: one round of OpenFGL's methods on a tiny graph of three clients.

Run by hand, where OpenFGL and torch are and this package need not be:

    python tests/algorithms/openfgl_golden.py [METHOD ...]

It was run with Python 3.11, openfgl-lib 1.1.0, torch 2.13.0+cpu, torch-geometric 2.8.1,
networkx 3.6.1, scikit-network 0.33.5, dtaidistance 2.5.1 and NumPy 2.4.6.
It writes `data/openfgl/problem.npz`, what all start from, and a file for each method,
all in float64. OpenFGL is left as it is, but for `openfgl_changes.py` and this:

- everybody trains the two-layer GCN, of the weights in `problem.npz`, without dropout;
  FED-PUB's has masks and no masked classifier, so that clients are compared by logits;
- a method whose clients know of a round's number is told it, and is given each round
  optimizers without a past, as ours have with `--client_optimizer=adam`, but for
  `fed_avg_goes_on`.

A method has one function in `METHODS`, which returns the arrays to keep, and so has the
way in which communities are dealt to clients.
"""

import argparse
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable
from unittest import mock

import numpy as np
import openfgl_changes
import torch
from torch_geometric.data import Data

FOLDER = pathlib.Path(__file__).parent / "data" / "openfgl"
NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES = 4, 5, 3
SIZES = (9, 6, 8)  # nodes of each client
PLACES = 2  # of generated neighbours
STEPS, RATE, DECAY = 3, 0.01, 5e-4
Arrays = dict[str, np.ndarray]


def make_problem() -> Arrays:
    """Three random graphs, halves of whose nodes are trained on, and first weights."""
    rng = np.random.default_rng(20)
    arrays = {}
    for k, size in enumerate(SIZES):
        is_edge = np.triu(rng.random((size, size)) < 0.4, 1)
        is_edge[np.arange(size - 1), np.arange(1, size)] = True
        edges = np.argwhere(is_edge)
        arrays[f"edges_{k}"] = np.concatenate([edges, edges[:, ::-1]])  # [E, 2]
        arrays[f"x_{k}"] = rng.normal(size=(size, NUM_FEATURES))
        arrays[f"y_{k}"] = rng.permutation(np.arange(size) % NUM_CLASSES)
        arrays[f"set_{k}"] = rng.permutation(np.arange(size) % 3)  # train, val, test
    shapes = {
        "hidden/kernel": (NUM_FEATURES, NUM_HIDDEN),
        "hidden/bias": (NUM_HIDDEN,),
        "head/kernel": (NUM_HIDDEN, NUM_CLASSES),
        "head/bias": (NUM_CLASSES,),
    }
    for name, shape in shapes.items():
        arrays[name] = rng.uniform(-0.6, 0.6, shape)
    return arrays


def make_data(problem: Arrays, k: int) -> Data:
    data = Data(
        x=torch.tensor(problem[f"x_{k}"]),
        edge_index=torch.tensor(problem[f"edges_{k}"].T.copy()),
        y=torch.tensor(problem[f"y_{k}"]),
    )
    data.num_global_classes = NUM_CLASSES
    data.global_map = {i: i for i in range(data.num_nodes)}
    return data


# --- Models ---------------------------------------------------------------------------


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {"hidden": model.layers[0], "head": model.layers[1]}


def load(model: torch.nn.Module, problem: Arrays) -> torch.nn.Module:
    """The problem's weights, in place."""
    with torch.no_grad():
        for name, layer in layers_of(model).items():
            layer.lin.weight.copy_(torch.tensor(problem[f"{name}/kernel"].T))
            layer.bias.copy_(torch.tensor(problem[f"{name}/bias"]))
    return model


def weights_of(model: torch.nn.Module) -> Arrays:
    """Kernels and biases under the names of ours."""
    arrays = {}
    for name, layer in layers_of(model).items():
        arrays[f"{name}/kernel"] = layer.lin.weight.detach().numpy().T.copy()
        arrays[f"{name}/bias"] = layer.bias.detach().numpy().copy()
    return arrays


def stacked(models: list[torch.nn.Module]) -> Arrays:
    """Weights of several models, [K, ...]."""
    rows = [weights_of(model) for model in models]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


# --- OpenFGL --------------------------------------------------------------------------


class World:
    """OpenFGL's clients and server of one method, on the problem."""

    def __init__(self, algorithm: str, **options):
        self.args = argparse.Namespace(
            **dict(
                fl_algorithm=algorithm,
                task="node_cls",
                dataset=["Cora"],
                model=["gcn"],
                num_clients=len(SIZES),
                num_epochs=STEPS,
                lr=RATE,
                weight_decay=DECAY,
                hid_dim=NUM_HIDDEN,
                num_layers=2,
                dropout=0.0,
                optim="adam",
                processing="raw",
                train_val_test="default_split",
                metrics=["accuracy"],
                dp_mech="no_dp",
                seed=0,
                scenario="subgraph_fl",
            )
            | options
        )
        self.problem = make_problem()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self._write_split()
        self.pool = {"sampled_clients": list(range(len(SIZES)))}
        from openfgl.utils.basic_utils import load_client, load_server

        place = (self.folder, self.pool, torch.device("cpu"))
        self.clients = [
            load_client(self.args, k, make_data(self.problem, k), *place)
            for k in range(len(SIZES))
        ]
        whole = make_data(self.problem, 0)  # gives the server its sizes alone
        self.server = load_server(self.args, whole, *place)
        for model in (self.server.task.model, *(c.task.model for c in self.clients)):
            if hasattr(model, "layers"):
                load(model, self.problem)

    def _write_split(self) -> None:
        import pickle

        folder = self.folder / "node_cls" / "default_split"
        folder.mkdir(parents=True)
        for k in range(len(SIZES)):
            for number, name in enumerate(("train", "val", "test")):
                mask = torch.tensor(self.problem[f"set_{k}"] == number)
                torch.save(mask, folder / f"{name}_{k}.pt")
                (folder / f"glb_{name}_{k}.pkl").write_bytes(pickle.dumps([0]))

    def run(self, rounds: int = 1, first: int = 0, optimizer=torch.optim.Adam):
        """Runs rounds as OpenFGL's trainer does, from round `first` on.

        Each begins with new optimizers; None: with those that OpenFGL made.
        """
        for number in range(first, first + rounds):
            self.pool["round"] = number
            self.server.send_message()
            for client in self.clients:
                if optimizer:
                    client.task.optim = optimizer(
                        client.task.model.parameters(), lr=RATE, weight_decay=DECAY
                    )
                client.execute()
                client.send_message()
            self.server.execute()
        return self

    @property
    def models(self) -> list[torch.nn.Module]:
        return [client.task.model for client in self.clients]


# --- Methods --------------------------------------------------------------------------


def ada_fgl() -> Arrays:
    """Each client's networks before and after one step, after one round of FedAvg.

    Products that it takes by a C library of its authors' machine are SciPy's, features
    that it makes float32 stay float64, and the 0.5 of its dropouts is 0.
    """
    from openfgl.flcore.adafgl import adafgl_models, client, server

    client.config["num_rounds_vanilla"] = server.config["num_rounds_vanilla"] = 1
    openfgl_changes.with_scipys_product()
    world, first = World("adafgl").run(), []
    preprocess = adafgl_models.AdaFGLModel.preprocess

    def observed(model, adj):
        preprocess(model, adj)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        first.append({key: x.clone() for key, x in model.state_dict().items()})

    with (
        mock.patch.object(adafgl_models.AdaFGLModel, "preprocess", observed),
        mock.patch.object(torch, "FloatTensor", torch.tensor),
        mock.patch.object(torch, "float", torch.float64),
    ):
        world.run(first=1)
    last = [one.adafgl_model.state_dict() for one in world.clients]
    ours = {
        "homo_model.": "homo",
        "hete_model.lr_smooth_trans.": "spread",
        "hete_model.lr_local_trans.": "own",
        "hete_model.hete_propagation.": "signed",
        "hete_model.": "hete",
    }
    arrays = {}
    for stage, rows in {"first": first, "last": last}.items():
        for name in rows[0]:
            network = next(own for start, own in ours.items() if name.startswith(start))
            values = np.stack([row[name].numpy() for row in rows])
            if "prelu" in name:
                arrays[f"{stage}/{network}_slope"] = values[:, 0]
                continue
            layer, kind = name.split(".")[-2:]
            is_kernel = kind == "weight"
            values = values.swapaxes(1, 2) if is_kernel else values
            kind = "kernel" if is_kernel else "bias"
            arrays[f"{stage}/{network}_{kind}_{layer}"] = values
    return arrays


def fed_avg() -> Arrays:
    return weights_of(World("fedavg").run().server.task.model)


def fed_avg_goes_on() -> Arrays:
    """Three rounds, whose clients' Adam goes on from round to round."""
    return weights_of(World("fedavg").run(3, optimizer=None).server.task.model)


def fed_prox() -> Arrays:
    """Two rounds with mu = 1e-3, its own."""
    return weights_of(World("fedprox").run(2).server.task.model)


class TwoMaskedLayers(torch.nn.Module):
    """OpenFGL's masked convolutions, two of them, as everybody else has."""

    def __init__(self, *args, **kwargs):
        from openfgl.flcore.fedpub.maskedgcn import MaskedGCNConv

        super().__init__()
        self.conv1 = MaskedGCNConv(NUM_FEATURES, NUM_HIDDEN)
        self.clsif = MaskedGCNConv(NUM_HIDDEN, NUM_CLASSES)
        self.layers = [self.conv1, self.clsif]
        self.double()

    def forward(self, data):
        y = self.clsif(self.conv1(data.x, data.edge_index).relu(), data.edge_index)
        return y, y


def fed_pub() -> Arrays:
    """u_i and masks after two rounds; a random graph that is smaller than its own."""
    openfgl_changes.without_torch_scatter()
    from openfgl.flcore.fedpub import client, server

    client.MaskedGCN = server.MaskedGCN = TwoMaskedLayers
    world = World("fedpub")
    proxy = make_data(world.problem, 1)
    world.server.proxy = proxy
    world.run(2)
    arrays = {}
    for name, layer in {"hidden": "conv1", "head": "clsif"}.items():
        sent = [
            {key: x.numpy() for key, x in weights.items()}
            for weights in world.server.update_weights
        ]
        arrays[f"weights/{name}/kernel"] = np.stack(
            [x[f"{layer}.lin.weight"].T for x in sent]
        )
        arrays[f"weights/{name}/bias"] = np.stack([x[f"{layer}.bias"] for x in sent])
        masks = [getattr(model, layer).mask for model in world.models]
        arrays[f"masks/{name}/kernel"] = np.stack([x.detach().numpy().T for x in masks])
    return arrays


def gcfl_plus() -> Arrays:
    """u_C after two rounds, at the end of which the clusters are split.

    Its own networks read whole graphs out: in their place stands the GCN. Rounds have
    numbers from 21 on, the limits let it split, by the norms of two rounds.
    """
    from openfgl.flcore.gcfl_plus import server
    from openfgl.model.gcn import GCN

    def network():
        return load(GCN(NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES, 2, 0.0), make_problem())

    openfgl_changes.with_network(network)
    server.config |= {"eps1": 10.0, "eps2": 0.0, "seq_length": 2}
    world = World("gcfl_plus")
    for one in world.clients:
        one.gconvNames = [name for name, _ in one.task.model.named_parameters()]
    world.run(2, first=21)
    rows = [None] * len(SIZES)
    for clients, weights in zip(
        world.server.cluster_indices, world.server.cluster_weights, strict=True
    ):
        for k, own in zip(clients, weights, strict=True):
            rows[k] = {name: x.detach().numpy() for name, x in own.items()}
    arrays = {}
    for i, name in enumerate(("hidden", "head")):
        kernels = [row[f"layers.{i}.lin.weight"].T for row in rows]
        arrays[f"{name}/kernel"] = np.stack(kernels)
        arrays[f"{name}/bias"] = np.stack([row[f"layers.{i}.bias"] for row in rows])
    return arrays


def local() -> Arrays:
    return stacked(World("isolate").run().models)


def fed_gta() -> Arrays:
    """u_i after two rounds; clients 0 and 1 are told apart by a similarity of 0.8."""
    from openfgl.flcore.fedgta import server

    server.config["accept_alpha"] = 0.8
    world = World("fedgta")
    for client in world.clients:  # which makes them float32
        client.train_label_onehot = client.train_label_onehot.double()
    return stacked(world.run(2).server.aggregated_models)


def louvain_in_turn() -> Arrays:
    """The client of each node [N], of given communities, by balances."""
    import sknetwork.clustering

    sys.modules.setdefault("metis", mock.MagicMock())  # it needs a C library
    from openfgl.data import simulation

    sizes = (70, 45, 33, 21, 17, 13, 11, 9, 8, 6, 4, 3)
    communities = np.repeat(np.arange(len(sizes)), sizes)
    communities = np.random.default_rng(7).permutation(communities)
    graph = Data(
        x=torch.zeros(len(communities), 1), edge_index=torch.tensor([[0], [1]])
    )
    arrays = {"communities": communities}
    with (
        mock.patch.object(
            sknetwork.clustering.Louvain, "fit_predict", lambda *_: communities
        ),
        mock.patch.object(
            simulation,
            "get_subgraph_pyg_data",
            lambda _, nodes: Data(x=torch.tensor(nodes), edge_index=graph.edge_index),
        ),
    ):
        for balance in (3, 10, 20):
            settings = argparse.Namespace(
                louvain_resolution=1.0, louvain_delta=balance, num_clients=5
            )
            parts = simulation.subgraph_fl_louvain(settings, [graph])
            owners = np.empty_like(communities)
            for client, part in enumerate(parts):
                owners[part.x.numpy()] = client
            arrays[f"owners_{balance}"] = owners
    return arrays


def under(name: str, arrays: Arrays) -> Arrays:
    return {f"{name}/{key}": x for key, x in arrays.items()}


def moon() -> Arrays:
    """Two rounds, as the first has no contrast."""
    return weights_of(World("moon").run(2).server.task.model)


def fed_proto() -> Arrays:
    """Two rounds, as the first has no prototypes; what the first one ends with too."""
    world = World("fedproto").run()
    first = under("first", stacked(world.models))
    prototypes = world.server.global_prototype
    first["prototypes"] = np.stack([prototypes[c].numpy() for c in range(NUM_CLASSES)])
    return first | stacked(world.run(first=1).models)


def of_clients(lists: list[list[torch.Tensor]]) -> Arrays:
    """What each client has of every weight, in the order of a model's, [K, ...]."""
    names = ("hidden/bias", "hidden/kernel", "head/bias", "head/kernel")
    columns = zip(*lists, strict=True)
    return {
        name: np.stack([x.detach().numpy().T for x in column])
        for name, column in zip(names, columns, strict=True)
    }


def fed_dc() -> Arrays:
    """Three rounds of plain SGD: the first has no penalties, the second no drifts.

    Also the server's model and the clients' after each, and the last one's drifts.
    """
    world, arrays = World("feddc"), {}
    for number, name in enumerate(("first", "second", "third")):
        drifts = of_clients([client.local_drift for client in world.clients])
        world.run(first=number, optimizer=torch.optim.SGD)
        arrays |= under(name, weights_of(world.server.task.model))
        arrays |= under(f"clients_{name}", stacked(world.models))
    return arrays | under("drifts", drifts)


def scaffold() -> Arrays:
    """Three rounds of plain SGD, without decay, which OpenFGL's controls have in them.

    The server's model and the clients' controls.
    """

    def sgd(params, lr, weight_decay):
        return torch.optim.SGD(params, lr=10 * lr)

    world = World("scaffold", lr=10 * RATE).run(3, optimizer=sgd)
    controls = of_clients([client.local_control for client in world.clients])
    return under("controls", controls) | weights_of(world.server.task.model)


def fgssl() -> Arrays:
    """Two rounds, on graphs that lose the same edges and features in each step."""
    openfgl_changes.without_torch_scatter()
    world, rng, kept = World("fgssl"), np.random.default_rng(3), {}
    for k, client in enumerate(world.clients):
        for name, share in (("augWeak", 0.7), ("augStrongF", 0.4)):
            edges = rng.random(len(world.problem[f"edges_{k}"])) < share
            features = rng.random(NUM_FEATURES) < share
            kept |= {f"{name}/edges_{k}": edges, f"{name}/features_{k}": features}

            def augment(x, edge_index, edges=edges, features=features):
                return x * torch.tensor(features), edge_index[:, edges], None

            setattr(client, name, augment)
    return kept | weights_of(world.run(2).server.task.model)


def fed_star() -> Arrays:
    """A round by hand, as OpenFGL has it for graphs: each node is pooled by itself.

    Weights at the start, encodings, the clients' own weights and the server's.
    """
    from types import SimpleNamespace

    from openfgl.flcore.fedstar._utils import init_structure_encoding
    from openfgl.flcore.fedstar.gin_dc import DecoupledGIN, serverGIN_dc
    from openfgl.flcore.fedstar.server import FedStarServer

    torch.manual_seed(1)
    sizes = dict(num_layers=2, hid_dim=NUM_HIDDEN, n_se=32)
    problem, pool = make_problem(), {"sampled_clients": list(range(len(SIZES)))}
    first = DecoupledGIN(NUM_FEATURES, output_dim=NUM_CLASSES, dropout=0.0, **sizes)
    start, arrays, clients = first.state_dict(), {}, []
    for k, size in enumerate(SIZES):
        graph = make_data(problem, k)
        init_structure_encoding(16, 16, [graph], "rw_dg")
        arrays[f"encoding_{k}"] = graph.stc_enc.numpy()
        graph.stc_enc, graph.batch = graph.stc_enc.double(), torch.arange(size)
        model = DecoupledGIN(NUM_FEATURES, output_dim=NUM_CLASSES, dropout=0.0, **sizes)
        model.load_state_dict(start)
        step = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=DECAY)
        mask = torch.tensor(problem[f"set_{k}"] == 0)
        for _ in range(STEPS):
            step.zero_grad()
            outputs = model(graph)[1][mask]
            torch.nn.functional.nll_loss(outputs, graph.y[mask]).backward()
            step.step()
        pool[f"client_{k}"] = {"num_samples": size, "weight": model.state_dict()}
        clients.append(decoupled(model.state_dict()))
    server = FedStarServer.__new__(FedStarServer)
    server.message_pool = pool
    server.task = SimpleNamespace(model=serverGIN_dc(**sizes))
    server.execute()
    shared = {n: x for n, x in server.task.model.state_dict().items() if "_s" in n}
    rows = {name: np.stack([own[name] for own in clients]) for name in clients[0]}
    arrays |= under("start", decoupled(start)) | under("clients", rows)
    return arrays | under("server", decoupled(shared))


def fed_sage_plus() -> Arrays:
    """Two rounds of generators, of fewer units, and one of classifiers.

    Nothing is drawn: no noise is added, and of n things the first are chosen, over
    again where there are too few. Plain SGD without decay: Adam would make steps of
    the rounding of OpenFGL's distances, which are in float32. Generators and
    classifiers of the clients after the second round, and the server's classifier
    after the second and the third.
    """
    from openfgl.flcore.fedsage_plus import client as module
    from openfgl.flcore.fedsage_plus import locsage_plus

    def choose(options, size, replace=True):
        options = np.arange(options) if isinstance(options, int) else sorted(options)
        return np.array(options)[np.arange(size) % len(options)]

    def sgd(params, lr, weight_decay):
        return torch.optim.SGD(params, lr=10 * lr)

    def zeros(mean, scale, size):
        return torch.zeros(size)

    sizes = {"latent_dim": 6, "max_pred": PLACES, "gen_rounds": 2}
    with (
        mock.patch.dict(module.config, sizes),
        mock.patch.object(module.np.random, "choice", choose),
        mock.patch.object(locsage_plus.torch, "normal", zeros),
    ):
        world = World("fedsage_plus")
        models = [world.server.task.model, *world.models]
        for model in models:
            made = model.neighGen.fGen
            made.fc1, made.fc2 = torch.nn.Linear(6, 7), torch.nn.Linear(7, 8)
            made.fc_flat = torch.nn.Linear(8, PLACES * NUM_FEATURES)
            with torch.no_grad():
                model.neighGen.dGen.reg.bias.fill_(1.6)  # so that all generate
            model.load_state_dict(models[0].state_dict())
        arrays = under("start", sage(models[0]))
        rows = [sage(model) for model in world.run(2, optimizer=sgd).models]
        both = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays |= under("clients", both)
        for name, rounds in (("middle", 0), ("server", 1)):
            own = sage(world.run(rounds, 2, sgd).server.task.model)
            arrays |= under(name, {n: x for n, x in own.items() if n[0] == "c"})
        return arrays


def sage(model: torch.nn.Module) -> Arrays:
    """Weights of generator and classifier under the names of ours."""
    generator, classifier = model.neighGen, model.classifier
    made = generator.fGen
    linear = {"degree": generator.dGen.reg, "first": made.fc1, "second": made.fc2}
    linear |= {"features": made.fc_flat}
    arrays = {}
    for name, layer in linear.items():
        arrays[f"generator/{name}/kernel"] = layer.weight
        arrays[f"generator/{name}/bias"] = layer.bias
    convolutions = {
        "generator/hidden": generator.encoder.layers[0],
        "generator/encoder": generator.encoder.layers[1],
        "classifier/hidden": classifier.layers[0],
        "classifier/head": classifier.layers[1],
    }
    for name, layer in convolutions.items():
        arrays[f"{name}/kernel"] = layer.lin_l.weight
        arrays[f"{name}/bias"] = layer.lin_l.bias
        arrays[f"{name}/root_kernel"] = layer.lin_r.weight
    return {name: x.detach().numpy().T.copy() for name, x in arrays.items()}


def decoupled(weights: dict[str, torch.Tensor]) -> Arrays:
    """Weights of `DecoupledGIN` under the names of ours."""
    names = {"pre.0": "input", "embedding_s": "structure_input", "Whp": "fuse"}
    names |= {"post.0": "last", "readout.0": "head"}
    for i in range(2):
        names[f"graph_convs_s_gcn.{i}.lin"] = names[f"graph_convs_s_gcn.{i}"] = (
            f"structure_{i}"
        )
        for j, name in ((0, "first"), (2, "second")):
            names[f"graph_convs.{i}.nn.{j}"] = f"layer_{i}/{name}"
    arrays = {}
    for name, x in weights.items():
        layer, _, kind = name.rpartition(".")
        if layer in names:
            ours = {"weight": "kernel", "bias": "bias"}[kind]
            arrays[f"{names[layer]}/{ours}"] = x.detach().numpy().T.copy()
    return arrays


METHODS: dict[str, Callable[[], Arrays]] = {
    "ada_fgl": ada_fgl,
    "fed_avg": fed_avg,
    "fed_avg_goes_on": fed_avg_goes_on,
    "fed_dc": fed_dc,
    "fed_gta": fed_gta,
    "fed_proto": fed_proto,
    "fed_prox": fed_prox,
    "fed_pub": fed_pub,
    "fed_sage_plus": fed_sage_plus,
    "fed_star": fed_star,
    "fgssl": fgssl,
    "gcfl_plus": gcfl_plus,
    "local": local,
    "louvain_in_turn": louvain_in_turn,
    "moon": moon,
    "scaffold": scaffold,
}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(FOLDER / "problem.npz", **make_problem())
    for name in sys.argv[1:] or METHODS:
        for module in (random, np.random, torch):
            (module.manual_seed if module is torch else module.seed)(0)
        # OpenFGL reads the command line when it is imported.
        with mock.patch.object(sys, "argv", sys.argv[:1]):
            arrays = METHODS[name]()
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
        print(name, {key: x.shape for key, x in arrays.items()})


if __name__ == "__main__":
    main()
