"""`import fedjax_graph as fg`: what it offers and loads, and pieces of one's own."""

import ast
import os
import pathlib
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

import fedjax_graph as fg
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.plugins import GROUP
from fedjax_graph.models.gcn import GCN, SGC
from fedjax_graph.tasks import nodes, subgraphs, traffic_rnn
from tests import client_graphs, tables
from tests.nodes import NUM_CLASSES, NUM_FEATURES, make_splits

ROOT = pathlib.Path(__file__).parents[1]


def python(*lines, cwd=None):
    """Runs lines in a fresh interpreter -> what they print."""
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return result.stdout.split()


def test_importing_it_loads_nothing_heavy():
    heavy = ("jax", "flax", "optax", "numpy", "scipy", "fedjax_graph.core")
    printed = python(
        "import sys, fedjax_graph as fg",
        "dir(fg), fg.__version__",
        f"print(*[name for name in {heavy} if name in sys.modules])",
    )
    assert printed == []


def test_a_command_waits_for_no_library_that_only_draws():
    printed = python(
        "import sys",
        "from experiments.studies import cnfgnn, fl_agcns, graphfl, sfl, subgraphs",
        "print(*[x for x in ('matplotlib', 'scipy.optimize') if x in sys.modules])",
    )
    assert printed == []


def test_importing_the_methods_imports_none():
    printed = python(
        "import sys",
        "from fedjax_graph import algorithms",
        "algorithms.method_names()",
        "own = [m for m in sys.modules if m.startswith('fedjax_graph.algorithms.')]",
        "print(*own)",
        "algorithms.get_method('fed_avg')",
        "print('fedjax_graph.algorithms.fed_avg' in sys.modules)",
        "print('fedjax_graph.algorithms.graphfl' in sys.modules)",
    )
    assert printed == ["True", "False"]


def test_every_public_name_is_there():
    for name in fg.__all__:
        assert getattr(fg, name) is not None
    assert set(dir(fg)) == set(fg.__all__)
    assert fg.get_method("local").takes_task
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = fg.no_such_name


def test_type_checkers_see_the_names_that_are_loaded_lazily():
    tree = ast.parse((ROOT / "fedjax_graph" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert set(seen) == set(fg.__all__) - {"__version__"}
    for name, module in seen.items():
        found = __import__(module, fromlist=[name])
        assert getattr(found, name) is getattr(fg, name)


# --- A method, a model and a dataset of one's own -----------------------------------

PLUGIN = '''
import dataclasses

import flax.linen as nn
import jax
import numpy as np

import fedjax_graph as fg
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from fedjax_graph.tasks import nodes


@dataclasses.dataclass(frozen=True)
class HalfwayConfig(fg.FederatedConfig):
    step_size: float = 0.5


@fg.register_method("plugin_halfway", title="Halfway")
def halfway(config: HalfwayConfig) -> fg.FederatedAlgorithm:
    """The mean, reached in part."""

    def aggregator(state, data, key):
        def aggregate(stacked, cohort):
            mean = fg.aggregation.weighted_mean(stacked, cohort)
            return jax.tree.map(
                lambda old, new: old + config.step_size * (new - old),
                state.models,
                mean,
            )

        return aggregate

    return fg.federated(config, aggregator)


class Perceptron(nn.Module):
    """Two layers that do not read the edges."""

    num_classes: int
    num_hops: int = 0
    first_layer: str | None = None

    @nn.compact
    def __call__(self, graph, is_training=False):
        return nn.Dense(self.num_classes, name="head")(
            nn.tanh(nn.Dense(3, name="hidden")(graph.nodes))
        )


@nodes.register_model("plugin_perceptron")
def perceptron(task):
    return Perceptron(task.num_classes)


@fg.register_dataset("plugin_path", kind="graphs", description="a path of nodes")
def path(num_nodes=4):
    nodes_ = np.arange(num_nodes, dtype=np.int32)
    edges = np.stack([nodes_[:-1], nodes_[1:]], axis=1)
    features = np.eye(num_nodes, dtype=np.float32)
    return NodeDataset("plugin_path", features, edges, nodes_ % 2, ("a", "b"), {})
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugin") / "my-pieces.py"
    file.write_text(PLUGIN)
    with tables.kept():
        yield fg.plugins.load(str(file))


def test_a_plugin_is_imported_once(plugin):
    assert fg.plugins.load(plugin.__file__) is plugin


def test_a_method_and_a_model_of_a_plugin_run_by_name(plugin):
    task = {
        "kind": "nodes",
        "num_features": NUM_FEATURES,
        "num_classes": NUM_CLASSES,
        "model": "plugin_perceptron",
        "inner_steps": 2,
    }
    method = fg.get_method("plugin_halfway")
    assert (method.title, method.takes_task) == ("Halfway", True)
    data = make_splits(num_hops=0)["train"]
    key = jax.random.key(1)

    def models(name, **settings):
        config = fg.make_config(name, {"task": task} | settings)
        algorithm = fg.get_method(name).factory(config)
        start = algorithm.init(jax.random.key(0), data)
        return start.models, algorithm.round(start, data, key)[0].models

    start, quarter = models("plugin_halfway", step_size=0.25)
    _, mean = models("fed_avg")
    assert set(start["params"]) == {"hidden", "head"}
    moved = jax.tree.map(lambda old, new: float(jnp.abs(new - old).max()), start, mean)
    assert min(jax.tree.leaves(moved)) > 0
    jax.tree.map(
        lambda old, new, found: npt.assert_allclose(
            found, old + 0.25 * (new - old), atol=1e-6
        ),
        start,
        mean,
        quarter,
    )


def test_a_dataset_of_a_plugin_is_loaded_by_name(plugin):
    dataset = fg.load("plugin_path", num_nodes=5)
    npt.assert_array_equal(dataset.edges, [[0, 1], [1, 2], [2, 3], [3, 4]])
    assert len(fg.load("plugin_path").labels) == 4
    assert fg.load("plugin_path", kind="graphs").name == "plugin_path"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import fedjax_graph as fg\n1 / 0\n", "line 2: ZeroDivisionError: division"),
        ("x = (\n", "line 1: SyntaxError: "),
        ("import sys\n\nsys.exit(3)\n", "line 3: SystemExit: 3"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
        (
            """
            import fedjax_graph as fg

            fg.register_aggregator("median", fg.aggregation.none)
            """,
            "line 4: aggregator 'median' is taken",
        ),
    ],
)
def test_a_broken_plugin_is_one_line_that_names_the_file(tmp_path, text, words):
    file = tmp_path / "broken.py"
    file.write_text(textwrap.dedent(text))
    for _ in range(2):  # nothing of a broken one is kept
        with pytest.raises(InputError) as raised:
            fg.plugins.load(str(file))
        message = str(raised.value)
        assert message.startswith(f"plugin {file}") and words in message
        assert len(message.splitlines()) == 1


def test_plugins_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match=r"plugin absent\.py: no such file"):
        fg.plugins.load("absent.py")
    with pytest.raises(InputError, match="plugin absent_package.own: ModuleNot"):
        fg.plugins.load("absent_package.own")
    with pytest.raises(InputError, match=r"plugin /x/my_method: .*/x/my_method\.py\?"):
        fg.plugins.load("/x/my_method")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda own: fg.load(own), "dataset None: expected a name or a path"),
        (lambda own: fg.plugins.load(own), "plugin None: expected the name"),
        (lambda own: fg.make_config("fed_avg", own), "fed_avg: None found, expected"),
        (lambda own: fg.get_method([own]), "unknown method [None]; known: "),
    ],
)
def test_what_is_no_name_is_one_line(call, words):
    with pytest.raises(fg.InputError) as raised:
        call(None)
    assert str(raised.value).startswith(words)


def test_installed_packages_name_their_plugins_as_entry_points(tmp_path):
    (tmp_path / "own_module.py").write_text("print('imported')\n")
    (tmp_path / "own_other.py").write_text("print('named')\n")
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nown = own_module\n")
    lines = (
        "import fedjax_graph as fg",
        "fg.plugins.load_all(['own_other'])",
    )
    assert python(*lines, cwd=tmp_path) == ["imported", "named"]
    (tmp_path / "own_module.py").write_text("1 / 0\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        python(*lines, cwd=tmp_path)
    last = raised.value.stderr.splitlines()[-1]
    assert "plugin own_module: ZeroDivisionError: division by zero" in last


# --- Models and aggregators by name -------------------------------------------------


def node_task(model):
    return nodes.NodeTask(num_features=3, num_classes=2, model=model)


@pytest.mark.parametrize(
    "build",
    [
        lambda: node_task("gnc").build(),
        lambda: traffic_rnn.TrafficRNNTask(model="gnc").build(),
        lambda: subgraphs.SubgraphTask(3, 2, model="gnc").build(),
    ],
)
def test_an_unknown_model_is_refused(build):
    words = "unknown (node|traffic|subgraph) model 'gnc'; known"
    with pytest.raises(InputError, match=words):
        build()


def test_a_model_that_lacks_what_the_task_needs_is_refused():
    class Bare(nn.Module):
        num_hops: int = 0

        @nn.compact
        def __call__(self, graph, is_training=False):
            return graph.nodes

    with tables.kept():
        for module in (nodes, traffic_rnn):
            module.register_model("bare", lambda task: Bare())
        with pytest.raises(InputError, match="node model 'bare': a Bare without 'fi"):
            node_task("bare").build()
        with pytest.raises(InputError, match="'bare': a Bare without 'num_features'"):
            traffic_rnn.TrafficRNNTask(model="bare").build()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: None, "raised TypeError: "),
        (lambda task: None, "returned None, expected a module"),
        (lambda task: SGC, "expected a module"),
        (GCN, "GCN was given the NodeTask as num_classes; register a function of it"),
        (GCN(2), "raised "),
        (lambda task: SGC(2, num_hops="two"), "num_hops='two' of a SGC, expected"),
    ],
)
def test_a_factory_that_is_not_one_is_a_line_that_names_the_model(factory, words):
    with tables.kept():
        nodes.register_model("wrong", factory)
        with pytest.raises(InputError) as raised:
            node_task("wrong").build()
    message = str(raised.value)
    assert message.startswith("node model 'wrong': ") and words in message
    assert len(message.splitlines()) == 1


def test_a_model_that_cannot_be_called_is_refused():
    for module, kind in ((nodes, "node"), (traffic_rnn, "traffic")):
        with pytest.raises(InputError, match=f"{kind} model 'one': 1 cannot be called"):
            module.register_model("one", 1)


def test_a_subgraph_model_of_ones_own_is_trained_by_any_method():
    class Perceptron(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, graph, mask=None, is_training=False):
            del mask, is_training
            return nn.Dense(self.num_classes, name="head")(graph.nodes)

    data = client_graphs.make_splits()["train"]
    with tables.kept():
        subgraphs.register_model("mlp", lambda task: Perceptron(task.num_classes))
        task = {
            "kind": "subgraphs",
            "num_features": client_graphs.NUM_FEATURES,
            "num_classes": client_graphs.NUM_CLASSES,
            "model": "mlp",
            "optimizer": {"learning_rate": 0.1},
        }
        for name in ("fed_avg", "fed_gta", "moon"):
            config = fg.make_config(name, {"task": task})
            method = fg.get_method(name).factory(config)
            state = method.init(jax.random.key(0), data)
            losses = []
            for seed in range(4):
                state, metrics = method.round(state, data, jax.random.key(seed))
                losses.append(float(metrics["train_loss"]))
            assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_scores_by_a_model_that_reads_all_nodes_do_not_depend_on_padding():
    class Centred(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, graph, mask=None, is_training=False):
            del is_training
            mean = jnp.average(graph.nodes, axis=0, weights=mask)
            return nn.Dense(self.num_classes, name="head")(graph.nodes - mean)

    data = client_graphs.make_splits()["test"]
    with tables.kept():
        subgraphs.register_model("centred", lambda task: Centred(task.num_classes))
        task = subgraphs.SubgraphTask(
            client_graphs.NUM_FEATURES, client_graphs.NUM_CLASSES, model="centred"
        ).build()
        model = jax.tree.map(lambda x: x[None], task.init(jax.random.key(0)))
        found = np.asarray(task.predict(model, data))
        one = jax.tree.map(lambda x: x[0], model)
        embed = jax.vmap(lambda own: task.embed(one, own, data).embeddings)
        embeddings = np.asarray(embed(task.client_data(data)))
    head = jax.tree.map(lambda x: np.asarray(x[0], float), model["params"]["head"])
    for client, size in enumerate(client_graphs.SIZES):
        nodes = np.asarray(data.features[client, :size], float)
        centred = nodes - nodes.mean(axis=0)
        npt.assert_allclose(embeddings[client, :size], centred, atol=1e-5)
        logits = centred @ head["kernel"] + head["bias"]
        expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        npt.assert_allclose(found[client, :size], expected, atol=1e-5)


def test_a_traffic_model_of_ones_own_forecasts(train):
    class LastReading(nn.Module):
        """Linear in the readings of the window; at first the last one, twelve times."""

        num_features: int = 2

        @nn.compact
        def __call__(self, inputs):
            shape = (12, len(inputs))
            weight = self.param("head", lambda key: jnp.zeros(shape).at[:, -1].set(1))
            return weight @ inputs[..., 0]

    with tables.kept():
        traffic_rnn.register_model("last", lambda task: LastReading())
        task = traffic_rnn.TrafficRNNTask(model="last", eval_batch_size=10).build()
    model = jax.tree.map(lambda x: x[None], task.init(jax.random.key(0)))
    forecasts = np.asarray(task.predict(model, train))
    speed, starts = np.asarray(train.speed), np.asarray(train.starts)
    assert forecasts.shape == (len(starts), len(speed), 12)
    last = speed[:, starts + 11].T  # [S, K]
    npt.assert_allclose(forecasts, np.repeat(last[..., None], 12, -1), atol=1e-4)
