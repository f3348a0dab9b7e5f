"""SFL's study from Python: as the binary, without flags."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import numpy.testing as npt
import pytest

from experiments.studies import running, sfl_problem, traffic
from experiments.studies.sfl import CONFIG_OPTIONS, SFLStudy
from fedjax_graph import algorithms
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_opt import FedAdamConfig
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core import aggregation, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks import images
from fedjax_graph.tasks.images import ImageTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask
from tests import tables
from tests.experiments import binary
from tests.experiments.test_sfl import Machine

# Runs a study, and gives what it returns.
PYTHON = """
import contextlib, io, json, sys
from experiments.studies.sfl import SFLStudy
settings = json.load(sys.stdin)
settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
with contextlib.redirect_stdout(io.StringIO()) as out:
    found = SFLStudy(**settings).run()
assert settings["workdir"] in out.getvalue()
print(json.dumps(found))
"""
PLUGIN = """
import dataclasses
import numpy as np
from fedjax_graph.algorithms import register_method
from fedjax_graph.core import aggregation, aggregators
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.data import register_dataset
from fedjax_graph.data.traffic import synthetic
from fedjax_graph.models.rnn import RNNForecaster
from fedjax_graph.tasks.traffic_rnn import register_model

@register_method("plain_mean")
def plain_mean(config: FederatedConfig):
    return federated(config, lambda *args: aggregation.weighted_mean)

@register_dataset("my_roads", kind="traffic")
def my_roads():
    return synthetic.traffic_network(num_sensors=7, num_days=2)

register_model("small_rnn", lambda task: RNNForecaster(3))
aggregators.register_aggregator("my_mean", aggregation.weighted_mean)
"""
SETTINGS = {
    "methods": ["fed_avg_m", "sfl_star"],
    "rnn_hidden_size": 4,
    "num_rounds": 1,
    "num_seeds": 2,
    "client_optimizer": "sgd,momentum=0.5",
    "learning_rate": 0.02,
    "server_optimizer": "sgd,momentum=0.3",
    "aggregator": "median",
}


def as_flags(settings):
    return [
        f"--{name}={','.join(map(str, x)) if isinstance(x, list) else x}"
        for name, x in settings.items()
    ]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def returned(machine):
    """What a study returns whose twin the binary has run."""
    folder = machine.folder
    settings = SETTINGS | {"dataset": str(folder / "mine.npz")}
    plugin = folder / "my_plugin.py"
    plugin.write_text(PLUGIN)
    lines = {
        "binary": as_flags(settings | {"workdir": str(folder / "binary")}),
        "plugin": [
            f"--workdir={folder / 'plugin'}",
            f"--plugin={plugin}",
            "--dataset=my_roads",
            "--model=small_rnn",
            "--aggregator=my_mean",
            "--methods=fed_avg,plain_mean",
            "--num_rounds=1",
        ],
    }
    machine.outputs(lines)
    line = json.dumps(settings | {"workdir": str(folder / "python")})
    process = machine.python(PYTHON, input=line)
    assert (process.returncode, process.stderr) == (0, "")
    return json.loads(process.stdout)


@pytest.mark.slow
def test_a_study_does_all_that_the_binary_does(machine, returned):
    names = ("binary", "python")
    files = [
        sorted(
            str(path.relative_to(machine.folder / name))
            for path in (machine.folder / name).iterdir()
        )
        for name in names
    ]
    assert files[0] == files[1] and "convergence.png" in files[0]
    assert machine.metrics("binary") == machine.metrics("python")
    one, other = (machine.results(name)["methods"] for name in names)
    assert list(one) == list(other) == list(SETTINGS["methods"])
    for method, entry in one.items():
        assert binary.without_timings(entry) == binary.without_timings(other[method])
    settings = [binary.settings_of(machine, name) for name in names]
    assert settings[0] == settings[1]


@pytest.mark.slow
def test_a_study_returns_what_it_wrote(machine, returned):
    assert returned == machine.results("python")["methods"]
    assert list(returned) == SETTINGS["methods"]
    for entry in returned.values():
        assert len(entry["rmse_by_horizon"]) == 12


@pytest.mark.slow
def test_the_chosen_optimizers_are_on_record(returned):
    for entry in returned.values():
        optimizer = entry["config"]["task"]["optimizer"]
        chosen = {key: optimizer[key] for key in ("name", "momentum", "learning_rate")}
        assert chosen == {"name": "sgd", "momentum": 0.5, "learning_rate": 0.02}
    server = returned["fed_avg_m"]["config"]["server_optimizer"]
    assert (server["momentum"], server["learning_rate"]) == (0.3, 1.0)
    assert "server_optimizer" not in returned["sfl_star"]["config"]


@pytest.mark.slow
def test_a_plugin_brings_a_method_a_model_and_more(machine, returned):
    del returned
    found = machine.results("plugin")
    assert (found["dataset"], found["settings"]["num_sensors"]) == ("synthetic", 7)
    same, own = (found["methods"][m] for m in ("fed_avg", "plain_mean"))
    assert own["config"]["task"]["model"] == "small_rnn"
    assert same["config"]["aggregator"] == "my_mean"
    assert own["test"] == same["test"], "the mean without its noise of 0"
    assert own["communication_bytes"] == same["communication_bytes"]


# --- What the options choose ----------------------------------------------------------


def test_what_is_not_given_is_the_datasets():
    short = SFLStudy()
    assert (short.kind, short.setting("num_clients"), short.setting("width")) == (
        *("images", 20),
        8,
    )
    task = sfl_problem.make_task(short, ImageTask, width=short.setting("width"))
    assert (task.batch_size, task.local_epochs, task.width) == (32, 5, 8)
    paper = dataclasses.replace(short, dataset="cifar10", batch_size=16)
    assert paper.setting("num_clients") == 100
    assert sfl_problem.make_task(paper, ImageTask) == ImageTask(batch_size=16)
    traffic = dataclasses.replace(short, dataset="metr_la")
    assert traffic.kind == "traffic"
    assert traffic.chosen_methods() == ["fed_avg", "fed_att", "sfl", "sfl_star"]
    assert short.chosen_methods() == ["fed_avg", "sfl"]
    assert short == SFLStudy()


def test_without_a_graph_the_methods_that_need_one_are_left_out():
    study = SFLStudy(dataset="metr_la", client_graph="none")
    assert study.chosen_methods() == ["fed_avg", "fed_att", "sfl_star"]
    found = dataclasses.replace(study, methods=("all",)).chosen_methods()
    assert found[-1] == "sfl_star" and found.count("sfl_star") == 1
    assert not {"sfl", "sfl_per", "sfl_lg", "graph_fed_avg", "mp_fed_avg"} & set(found)
    assert {"local", "ditto"} < set(found)


def test_the_rate_is_kept_under_another_optimizer():
    study = SFLStudy(learning_rate=0.2, client_optimizer="adam,second_momentum=0.9")
    optimizer = sfl_problem.make_task(study, TrafficRNNTask).optimizer
    assert optimizer == OptimizerConfig("adam", 0.2, second_momentum=0.9)
    assert sfl_problem.make_task(SFLStudy(), TrafficRNNTask).optimizer == (
        OptimizerConfig("sgd", 0.01)
    )


def test_the_servers_optimizer_starts_from_that_of_its_method():
    study = SFLStudy(server_optimizer="adam,learning_rate=0.1")
    found = study.method_values("fed_adam")["server_optimizer"]
    assert (found.learning_rate, found.second_momentum) == (0.1, 0.99)
    found = study.method_values("fed_avg")["server_optimizer"]
    assert found == OptimizerConfig("adam", 0.1)
    assert "server_optimizer" not in study.method_values("sfl")
    found = SFLStudy().method_values("fed_adam")["server_optimizer"]
    assert found == FedAdamConfig.server_optimizer
    assert "server_optimizer" not in SFLStudy().method_values("fed_avg")


def test_the_protocol_of_the_code_drops_partial_batches_and_breaks_ties_upwards():
    """Of 40 images of 10 labels, 36 train: one batch of 20; counts tie at the fifth."""
    few = {"num_images": 200, "num_test_images": 200, "num_clients": 5, "shards": 8}
    study = SFLStudy(
        **few, batch_size=20, methods=("sfl_star",), relation_weights="count"
    )
    code_study = dataclasses.replace(study, protocol="code")
    paper, code = (sfl_problem.make(x) for x in (study, code_study))
    assert (paper.task.drop_last, code.task.drop_last) == (False, True)
    assert (paper.num_examples, code.num_examples) == (5 * 36, 5 * 20)
    kept = dataclasses.replace(code_study, given=frozenset({"drop_last"}))
    assert not sfl_problem.make(kept).task.drop_last  # as --nodrop_last says
    shared = [
        np.asarray(graphs.dense_adjacency(x.splits["train"].graph))
        for x in (paper, code)
    ]
    assert not np.array_equal(*shared)
    for labels in shared:
        npt.assert_array_equal(np.diagonal(labels), 5)
        assert set(labels.ravel()) <= {1, 2, 3, 4, 5}
    built = [
        running.config_of(
            "sfl_star", x.method_values("sfl_star") | {"task": paper.task}
        )
        for x in (study, code_study)
    ]
    assert [x.structure.compares for x in built] == ["params", "state"]


@dataclasses.dataclass(frozen=True)
class OwnConfig(FederatedConfig):
    """Of a user's, with some of SFL's names and other defaults."""

    alpha: float = 0.1
    score: str = "mine"
    start: str = "zero"
    structure: int = 3


def test_a_methods_own_fields_are_not_those_of_sfl_by_the_same_name():
    def own(config: OwnConfig):
        return federated(config, lambda *args: aggregation.weighted_mean)

    def config(**options):
        study = SFLStudy(methods=("own",), **options)
        values = study.method_values("own") | {"task": TrafficRNNTask()}
        return running.config_of("own", values)

    with tables.kept():
        algorithms.register_method("own", own, OwnConfig)
        first, given = config(), config(alpha=0.5, client_start="personal")
        assert SFLStudy(methods=("own",), alpha=0.5).chosen_methods() == ["own"]
    assert (first.alpha, first.score, first.start) == (0.1, "mine", "zero")
    assert first.structure == 3
    assert (given.alpha, given.score, given.start) == (0.5, "mine", "personal")


def test_the_flag_of_what_is_scored_is_of_sfls_kin_alone():
    """FedAvg beside them is scored as ever, but where a setting of its own says so."""
    settings = ("fed_avg.score=local",)
    plain = SFLStudy(methods=("fed_avg", "sfl"), score="local")
    given = dataclasses.replace(plain, method_settings=settings)
    for study in (plain, given):
        assert study.chosen_methods() == ["fed_avg", "sfl"]
        assert study.method_values("sfl")["score"] == "local"
    assert "score" not in plain.method_values("fed_avg")
    assert given.method_values("fed_avg")["score"] == "local"


@dataclasses.dataclass(frozen=True)
class TrimmedConfig(FedAvgConfig):
    """Of a user's, with an aggregator of its own by default."""

    aggregator: str = "trimmed_mean"
    tolerance: float = 0.3


def test_what_is_not_said_of_trust_is_the_configs_own():
    with tables.kept():
        algorithms.register_method("trimmed", fed_avg, TrimmedConfig)
        found = []
        for given in ({}, {"aggregator": "krum"}):
            study = SFLStudy(methods=("trimmed",), **given)
            values = study.method_values("trimmed") | {"task": TrafficRNNTask()}
            config = running.config_of("trimmed", values)
            found.append((config.aggregator, config.tolerance))
    assert found == [("trimmed_mean", 0.3), ("krum", 0.3)]


def test_a_checkpoint_that_does_not_know_the_images_size_goes_on():
    """The data's own checksum says whether they are the same."""
    config = FedAvgConfig(ImageTask(image_shape=(16, 12, 1)))
    assert running.config_defaults(config)["task"]["image_shape"] == (16, 12, 1)


def test_options_that_are_not_given_are_the_configs_own():
    """So that what `--help` says of them is what runs."""
    fields = algorithms.get_method("sfl_star").fields
    for option, field in CONFIG_OPTIONS.items():
        default = getattr(SFLStudy(), option)
        if default is not None:  # says what a config has
            assert fields[field].default == default
    assert StructureConfig().target == SFLStudy().structure_target


def test_grey_images_are_dealt_out_and_trained_on(tmp_path):
    """By shapes alone, which take no compiler; the moments are of the one channel."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 12, 10), dtype=np.uint8)
    labels = np.arange(60) % 5
    path = tmp_path / "digits.npz"
    halves = {"train_images": pixels, "test_images": pixels, "train_labels": labels}
    np.savez(path, **halves, test_labels=labels)
    few = {"num_clients": 5, "shards": 2, "width": 2, "batch_size": 4}
    study = SFLStudy(**few, dataset=str(path), methods=("fed_avg",))
    problem = sfl_problem.make(study)
    assert problem.task.image_shape == (12, 10, 1)
    assert problem.task.num_classes == 5
    train = problem.splits["train"]
    npt.assert_allclose(train.mean, [pixels.mean() / 255], rtol=1e-6)
    npt.assert_allclose(train.std, [pixels.std() / 255], rtol=1e-6)
    values = study.method_values("fed_avg") | {"task": problem.task}
    _, algorithm = running.build("fed_avg", values)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), train)
    kernel = state.models["params"]["prep"]["kernel"]
    assert kernel.shape == (1, 3, 3, 1, 2)
    after, _ = jax.eval_shape(algorithm.round, state, train, jax.random.key(1))
    assert after.models["params"]["prep"]["kernel"].shape == kernel.shape
    jax.eval_shape(algorithm.evaluate, state, problem.splits["test"])


def test_a_model_of_ones_own_is_trained_on_images(tmp_path, quick_jit):
    """A linear one without statistics, whose shape depends on the images' size."""

    class Linear(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, images, mask=None):
            flat = images.reshape(len(images), -1)
            return nn.Dense(self.num_classes, name="head")(flat)

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 6, 5, 1), dtype=np.uint8)
    labels = np.arange(60) % 5
    path = tmp_path / "tiny.npz"
    halves = {"train_images": pixels, "test_images": pixels, "train_labels": labels}
    np.savez(path, **halves, test_labels=labels)
    few = {"num_clients": 5, "shards": 2, "batch_size": 12, "local_epochs": 1}
    few["augment"] = False
    steps = {
        "client_optimizer": "sgd,learning_rate=0.1,weight_decay=0,schedule=constant"
    }
    with tables.kept():
        images.register_model("linear", lambda task: Linear(task.num_classes))
        study = SFLStudy(**few, **steps, dataset=str(path), model="linear")
        problem = sfl_problem.make(study)
        task = problem.task.build()
        other = dataclasses.replace(study, model="cnn")
        with pytest.raises(InputError, match="'cnn'; known: resnet9, linear"):
            sfl_problem.make(other)
        cut_out = dataclasses.replace(study, augment=True)
        with pytest.raises(InputError, match="at least 8 each way, or --noaugment"):
            sfl_problem.make(cut_out)
    train = problem.splits["train"]
    start = task.init(jax.random.key(0))
    own = jax.tree.map(lambda x: x[1], task.client_data(train))
    update = quick_jit(
        lambda start, own, data: task.update(
            start, own, jax.random.key(1), data, None, 0
        )
    )
    moved = update(start, own, train).model["params"]["head"]
    indices = np.asarray(own[0])[np.asarray(own[1]) > 0]  # one batch holds them all
    assert len(indices) < 12
    x = np.asarray(train.images)[indices].reshape(len(indices), -1) / 255
    x = (x - float(train.mean[0])) / float(train.std[0])
    head = jax.tree.map(lambda x: np.asarray(x, float), start["params"]["head"])
    logits = x @ head["kernel"] + head["bias"]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wrong = shares - np.eye(5)[np.asarray(train.labels)[indices]]
    rate = 0.1 / 12  # of the batch size, as the released code has it
    npt.assert_allclose(moved["kernel"], head["kernel"] - rate * x.T @ wrong, atol=1e-5)
    npt.assert_allclose(moved["bias"], head["bias"] - rate * wrong.sum(0), atol=1e-5)


def test_clients_along_another_graph_are_other_data():
    few = {"num_images": 200, "num_test_images": 200, "num_clients": 5, "shards": 8}
    problems = [
        sfl_problem.make(SFLStudy(**few, methods=("sfl_star",), relation_weights=x))
        for x in ("binary", "count", "count")
    ]
    assert len({x.checksum for x in problems}) == 1
    binary, count, again = [x.also["graph"] for x in problems]
    assert binary != count == again


def test_readings_of_another_time_are_other_data(network):
    shifted = network.timestamps + np.timedelta64(1, "h")
    later = dataclasses.replace(network, timestamps=shifted)
    found, other = (traffic.time_checksum(x) for x in (network, later))
    assert found.keys() == {"time_stamps"} and found != other
    study = SFLStudy(dataset="synthetic", num_sensors=4, num_days=2)
    expected = traffic.time_checksum(study.load_network())
    assert sfl_problem.make(study).also == expected


def test_a_checkpoint_may_be_older_than_a_checksum(monkeypatch, tmp_path):
    """What it does not have counts as being the same, and what it has is compared."""
    study = SFLStudy(dataset="synthetic", num_sensors=4, num_days=2)
    problem, seen = sfl_problem.make(study), {}

    def run(*args, defaults, **rest):
        seen.update(settings=args[5], defaults=defaults)

    monkeypatch.setattr(running.rounds, "run", run)
    study._run_method("sfl_star", problem, tmp_path)
    for key, value in problem.also.items():
        assert seen["settings"][key] == seen["defaults"][key] == value
    assert seen["settings"]["data"] == problem.checksum


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"methods": ["sfl"]}, "--methods=.*expected a tuple"),
        ({"methods": ("sfl", "sfn")}, "--methods: unknown method 'sfn'; known: all"),
        ({"alpha": 1.5}, "--alpha=1.5: expected 1.0 or less"),
        ({"alpha": float("nan")}, "--alpha=nan: expected a number"),
        ({"shards": 0}, "--shards=0: expected 1 or more"),
        (
            {"client_start": "w"},
            "--client_start=w: expected one of global, .*, own",
        ),
        ({"methods": ("fed_avg",), "alpha": 0.5}, "--alpha concerns none of"),
        (
            {"methods": ("fed_avg", "local"), "relation_weights": "count"},
            "--relation_weights concerns none of the methods fed_avg, local",
        ),
        (
            {"client_graph": "none", "relation_weights": "count"},
            "--relation_weights concerns none of the methods",
        ),
        (
            {"methods": ("fed_avg",), "server_optimizer": "adam"},
            "--server_optimizer=adam: give learning_rate",
        ),
        (
            {"methods": ("sfl",), "server_optimizer": "sgd"},
            "--server_optimizer concerns none of the methods sfl",
        ),
        (
            {"methods": ("sfl",), "aggregator": "median"},
            "--aggregator concerns none of the methods sfl",
        ),
        ({"aggregator": "mean"}, "--aggregator=mean: unknown; known: median, weighted"),
        ({"server_optimizer": "adan"}, "--server_optimizer=adan: .*known: sgd"),
        ({"client_optimizer": "sgd,x"}, "--client_optimizer=sgd,x: .*'x' is no field"),
        ({"dataset": "metrla"}, "unknown dataset 'metrla' .is metr_la meant..; known"),
        ({"dataset": "cora"}, "--dataset=cora is one of graphs; expected traffic or"),
        ({"dataset": "synthetic", "width": 8}, "--width is for images"),
        ({"dataset": "synthetic", "model": "cnn"}, "'cnn'; known: rnn"),
        ({"num_days": 3}, "--num_days is for traffic"),
        ({"dataset": "synthetic", "drop_last": True}, "--drop_last is for images"),
        ({"drop_last": True, "batch_size": 91}, "--drop_last.* has 90 .*_size=91 or"),
        (
            {"num_clients": 100, "num_images": 200},
            "--num_clients=100 of 200 .* 2 each, .* more --num_images",
        ),
        ({"score": "w"}, "--score=w: expected one of aggregated, local"),
        ({"methods": ("fed_avg",), "score": "local"}, "--score concerns none of"),
        ({"plugin": ("nowhere.py",)}, "plugin nowhere.py: no such file"),
    ],
)
def test_bad_settings_are_one_line_that_names_the_flag(
    settings, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SFLStudy, "set_up_jax", lambda *args, **settings: None)
    with pytest.raises(InputError, match=words) as caught:
        SFLStudy(**settings).run()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
