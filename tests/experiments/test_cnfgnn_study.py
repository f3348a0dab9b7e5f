"""CNFGNN's study from Python: as the binary, without flags."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.studies import cnfgnn, running
from experiments.studies import cnfgnn_configs as configs
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.cnfgnn_output import ExchangeCurve, draw_exchanges
from fedjax_graph import algorithms
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver import plots, writers
from tests.experiments import binary
from tests.experiments.test_cnfgnn import METHODS, Machine

# Runs studies one after another; gives what they return.
PYTHON = """
import contextlib, io, json, sys
from experiments.studies.cnfgnn import CNFGNNStudy
found = []
for settings in json.load(sys.stdin):
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found.append(CNFGNNStudy(**settings).run())
    assert settings["workdir"] in out.getvalue()
print(json.dumps(found))
"""
PLUGIN = """
from fedjax_graph.algorithms import register_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg

@register_method("mine", title="Mine")
def mine(config: FedAvgConfig):
    return fed_avg(config)
"""
SETTINGS = {
    "hidden_size": 4,
    "gn_mlp_sizes": [4, 4],
    "gn_layers": 1,
    "gru_hidden_size": 4,
    "num_rounds": 1,
    "client_optimizer": "sgd,momentum=0.5",
    "client_learning_rate": 0.02,
}
SWEEP = {"sweep": "rounds", "sweep_values": [2]}


def test_the_methods_are_those_that_the_encoder_decoder_can_train():
    known = CNFGNNStudy().known_methods()
    assert {"cnfgnn", "gru_fmtl", "ditto", "fed_dc", "sfl"} <= known.keys()
    assert known.keys().isdisjoint({"moon", "fed_sgd", "graphfl", "ada_fgl"})


def as_flags(settings):
    return [
        f"--{name}={','.join(map(str, x)) if isinstance(x, list) else x}"
        for name, x in settings.items()
        if x is not None
    ]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def returned(machine):
    """What the studies return whose twins the binary has run: a run, and a sweep."""
    folder = machine.folder
    (folder / "plugin.py").write_text(PLUGIN)
    common = SETTINGS | {"dataset": str(folder / "tiny.npz")}
    plugged = {"plugin": [str(folder / "plugin.py")], "methods": [*METHODS, "mine"]}
    twins = {
        "run": common | plugged | {"num_seeds": 2},
        "sweep": common | {"methods": ["cnfgnn"], "gru_hidden_size": None} | SWEEP,
    }

    def settings(name, kind):
        return twins[name] | {"workdir": str(folder / f"{kind}_{name}")}

    answers = machine.run_many(
        {name: as_flags(settings(name, "binary")) for name in twins}
    )
    titles = ["persistence", "GRU + FedAvg", "CNFGNN", "Mine"]
    assert list(binary.table_of(answers["run"][1])) == titles
    assert [answer[::2] for answer in answers.values()] == [[0, ""]] * len(twins)
    lines = json.dumps([settings(name, "python") for name in twins])
    process = machine.python(PYTHON, input=lines)
    assert (process.returncode, process.stderr) == (0, "")
    return dict(zip(twins, json.loads(process.stdout), strict=True))


@pytest.mark.slow
def test_a_study_does_all_that_the_binary_does(machine, returned):
    del returned
    binarys, pythons = (
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
        for folder in (machine.folder / "binary_run", machine.folder / "python_run")
    )
    assert binarys == pythons and len(binarys) == 4
    assert machine.metrics("binary_run") == machine.metrics("python_run")
    one, other = (machine.results(f"{kind}_run") for kind in ("binary", "python"))
    for method in (*METHODS, "mine"):
        entries = [found["methods"][method] for found in (one, other)]
        assert binary.without_timings(entries[0]) == binary.without_timings(entries[1])
    flags = [found["settings"]["flags"] for found in (one, other)]
    assert [x.pop("workdir") for x in flags] == [
        str(machine.folder / name) for name in ("binary_run", "python_run")
    ]
    assert flags[0] == flags[1]
    assert flags[0]["gn_mlp_sizes"] == [4, 4]


@pytest.mark.slow
def test_a_study_returns_what_it_wrote(machine, returned):
    assert returned["run"] == machine.results("python_run")["methods"]
    path = machine.folder / "python_sweep" / "sweep.json"
    assert returned["sweep"] == json.loads(path.read_text())
    of_binary = machine.folder / "binary_sweep" / "sweep.json"
    assert returned["sweep"] == json.loads(of_binary.read_text())


@pytest.mark.slow
def test_the_chosen_optimizer_is_on_record(machine, returned):
    del returned
    found = machine.results("python_run")["methods"]
    chosen = [found["cnfgnn"]["config"]["client_optimizer"]]
    for name in ("gru_fedavg", "mine"):
        chosen.append(found[name]["config"]["task"]["optimizer"])
    for config in chosen:
        kept = {key: config[key] for key in ("name", "momentum", "learning_rate")}
        assert kept == {"name": "sgd", "momentum": 0.5, "learning_rate": 0.02}
    assert found["cnfgnn"]["config"]["server_optimizer"]["name"] == "adam"


@pytest.mark.slow
def test_a_plugins_method_runs_on_the_grus_task(machine, returned):
    del returned
    found = machine.results("python_run")["methods"]
    assert found["mine"]["config"]["task"]["kind"] == "traffic_seq2seq"
    sent = [found[m]["communication_bytes_in_all"] for m in ("mine", "gru_fedavg")]
    assert sent[0] == sent[1] and sent[0]["up"] > 0
    assert found["mine"]["device_gflops"] == found["gru_fedavg"]["device_gflops"]


# --- What the options choose ----------------------------------------------------------


def test_the_released_commands_are_the_defaults_of_their_datasets(tmp_path):
    """Batch sizes, rounds and layers from the commands that come with the paper."""
    num_train = 23974  # windows of METR-LA to train on

    def values(method, **settings):
        study = CNFGNNStudy(**settings)
        return configs.config_values(study, method, num_train, tmp_path)

    released = {"gru_centralized": (256, 128), "gru_local": (256, 256)}
    for method, sizes in released.items():
        for layers, size in enumerate(sizes, start=1):
            task = values(method, dataset="metr_la", gru_layers=layers)["task"]
            assert task.batch_size == size
    assert values("gru_gn", dataset="metr_la")["server_batch_size"] == 64
    assert "server_rounds" not in values("cnfgnn", dataset="metr_la")
    inductive = values("cnfgnn", dataset="metr_la", train_fraction=0.25)
    assert inductive["server_rounds"] == 20
    assert values("cnfgnn", dataset="pems_bay")["server_rounds"] == 20
    assert values("cnfgnn", dataset="metr_la")["sampling_decay"] == 1000
    fmtl = values("gru_fmtl", fmtl_regulariser="frobenius", client_rounds=3)
    assert (fmtl["weight"], fmtl["task"].local_epochs) == (0.01, 5)
    local = values("gru_local", dataset="metr_la", client_rounds=3)
    assert local["task"].local_epochs == 3
    assert local["task"].sampling_decay == 1000
    assert values("gru_fedavg")["task"].sampling_decay == 1


def test_rounds_and_patience_are_those_of_the_released_code_unless_given():
    study = CNFGNNStudy(dataset="metr_la")
    rounds = [configs.most_rounds(study, m) for m in ("cnfgnn", "at_without_fedavg")]
    assert rounds == [500, 50]
    assert [configs.patience(study, m) for m in ("cnfgnn", "gru_gn")] == [20, 50]
    study = dataclasses.replace(study, num_rounds=7, patience=20)
    assert configs.most_rounds(study, "at_without_fedavg") == 7
    assert configs.patience(study, "gru_gn") == 20


def test_rates_and_optimizers_are_flags_of_their_own():
    study = CNFGNNStudy(
        dataset="metr_la", server_learning_rate=0.5, server_optimizer="adamw"
    )
    default = OptimizerConfig("adam", 0.1)
    found = configs.optimizer(study, "server", default)
    assert found == OptimizerConfig("adamw", 0.5)
    assert configs.optimizer(study, "client", default) == default


def test_the_servers_optimizer_is_that_of_methods_that_have_one(tmp_path):
    """FedAvg's takes the mean, and is asked for a rate of its own; local has none."""
    study = CNFGNNStudy(server_optimizer="adam", client_learning_rate=0.3)

    def chosen(study, method):
        values = configs.config_values(study, method, 54, tmp_path)
        return values.get("server_optimizer")

    with pytest.raises(InputError, match="give learning_rate, as the server of fed"):
        chosen(study, "gru_fedavg")
    with_sgd = CNFGNNStudy(server_optimizer="sgd,momentum=0.9")
    assert chosen(with_sgd, "gru_fedavg") == OptimizerConfig("sgd", 1.0, momentum=0.9)
    assert chosen(study, "gru_local") is None
    assert chosen(CNFGNNStudy(), "gru_fedavg") is None
    slower = dataclasses.replace(study, server_learning_rate=0.1)
    assert chosen(slower, "gru_fedavg") == OptimizerConfig("adam", 0.1)
    fed_yogi = chosen(CNFGNNStudy(server_optimizer="yogi,momentum=0.5"), "fed_yogi")
    assert (fed_yogi.learning_rate, fed_yogi.momentum) == (0.01, 0.5)
    assert fed_yogi.second_momentum == 0.99
    rated = chosen(CNFGNNStudy(server_learning_rate=0.3), "fed_adam")
    assert (rated.name, rated.learning_rate) == ("adam", 0.3)
    assert chosen(slower, "cnfgnn") == OptimizerConfig("adam", 0.1)


def test_a_study_made_of_another_leaves_it_as_it_is():
    study = CNFGNNStudy(methods=("cnfgnn",))
    other = dataclasses.replace(study, train_fraction=0.5, methods=None)
    assert study == CNFGNNStudy(methods=("cnfgnn",))
    assert other.chosen_methods() == ["persistence", "gru_fedavg", "cnfgnn"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        study.seed = 1


@pytest.mark.parametrize("method", ["fed_prox", "scaffold", "ditto", "sfl"])
def test_what_else_federates_a_task_runs_on_the_grus(method, splits, tmp_path):
    study = CNFGNNStudy(methods=(method,), gru_hidden_size=4, masked_loss=True)
    assert study.chosen_methods() == [method]
    train = splits["train"]
    values = configs.config_values(study, method, len(train.starts), tmp_path)
    config = running.config_of(method, values)
    assert (config.task.hidden_size, config.task.masked_loss) == (4, True)
    algorithm = algorithms.get_method(method).factory(config)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), train)
    after, _ = jax.eval_shape(algorithm.round, state, train, jax.random.key(1))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert "masked" in jax.eval_shape(algorithm.evaluate, after, splits["test"])


def test_a_part_of_a_sweep_is_a_run_of_its_own(monkeypatch, tmp_path):
    """Which its command makes anew: without the sweep, and in its own folder."""
    monkeypatch.delenv("FEDJAX_GRAPH_DATA", raising=False)
    entry = {"test": {"rmse": 1.0}, "test_std": None, "best_round": 1}
    entry["communication_bytes"] = {"up": 1, "down": 1}
    seen = []

    def run_methods(study, *_):
        seen.append(study)
        return {"cnfgnn": entry}

    monkeypatch.setattr(cnfgnn, "run_methods", run_methods)
    CNFGNNStudy(
        sweep="rounds",
        sweep_values=(1, 2),
        given=frozenset({"sweep"}),
        num_sensors=4,
        num_days=2,
        workdir=str(tmp_path / "run"),
    ).run()
    assert [x.workdir for x in seen] == [
        str(tmp_path / "run" / name) for name in ("1-1", "1-2", "2-1", "2-2")
    ]
    assert seen[2].command() == (
        f"python -m experiments.cnfgnn --workdir={tmp_path}/run/2-1 --methods=cnfgnn "
        "--num_sensors=4 --num_days=2 --sampling_decay=30.0 --client_rounds=2 "
        "--server_rounds=1"
    )
    assert seen[2].chosen_methods() == ["cnfgnn"]


def test_the_band_of_what_is_exchanged_is_that_of_a_sample(monkeypatch, tmp_path):
    """Over seeds, as in all other pictures."""
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda *args, **_: drawn.append(args[1]))
    curve = ExchangeCurve(np.array([1, 2]), np.array([[4.0, 6.0], [3.0, 3.0]]))
    alone = curve._replace(rmse=curve.rmse[:, :1])
    given = {"cnfgnn": curve, "gru_fedavg": alone}
    draw_exchanges(tmp_path, given, "mph", plots.Look())
    both, one = drawn[0].values()
    assert list(both.spread) == [np.std([4, 6], ddof=1), 0]
    assert list(one.spread) == [0, 0]


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gn_mlp_sizes": (4,)}, "--gn_mlp_sizes=4: expected two or more"),
        ({"gn_mlp_sizes": (4, 0)}, "--gn_mlp_sizes=4,0: 0: expected 1 or more"),
        ({"gn_mlp_sizes": ("4", "4")}, "--gn_mlp_sizes=4,4: '4': expected a whole"),
        ({"strategy": "sl"}, "--strategy=sl: expected a tuple"),
        ({"strategy": ("sl", "slow")}, "--strategy=sl,slow: name one or more"),
        ({"methods": ("cnfgnn", "gnn")}, "--methods: unknown method 'gnn'; known: "),
        ({"train_fraction": 1}, "--train_fraction=1: expected a number between 0 and"),
        (
            {"train_fraction": 0.5, "methods": ("all",)},
            "--train_fraction is not for at_without_fedavg",
        ),
        (
            {"train_fraction": 0.5, "methods": ("ditto",)},
            "--train_fraction is not for ditto, whose models may belong to single",
        ),
        (
            {
                "train_fraction": 0.5,
                "methods": ("gru_fedavg",),
                "method_settings": ("gru_fedavg.score=local",),
            },
            "--train_fraction is not for gru_fedavg, whose models belong to single",
        ),
        ({"sweep": "rounds", "sweep_values": (1, 1)}, "--sweep_values: expected diff"),
        ({"sweep_values": (1, 2)}, "--sweep_values needs --sweep"),
        ({"client_optimizer": "adan"}, "'adan': unknown (is adam meant?); known: sgd"),
        (
            {"server_optimizer": "sgd", "methods": ("gru_local",)},
            "--server_optimizer concerns none of the methods gru_local",
        ),
        (
            {"client_optimizer": "sgd", "methods": ("persistence",)},
            "--client_optimizer concerns none of the methods persistence",
        ),
        *(
            ({"methods": ("gru_fedavg",), name: value}, f"--{name} concerns none of ")
            for name, value in (
                ("hidden_size", 4),
                ("exchange_bits", "8"),
                ("server_dtype", "bfloat16"),
                ("average_every_step", True),
                ("fmtl_weight", 0.1),
                ("server_learning_rate", 0.1),
            )
        ),
        ({"methods": ("cnfgnn",), "gru_layers": 2}, "--gru_layers concerns none of"),
        *(
            (
                {"methods": ("cnfgnn", name), "participation": 0.1},
                f"--participation is not for {name}, in which all clients take part",
            )
            for name in (
                *("split_learning", "split_learning_fedavg", "gru_fmtl", "gru_gn"),
                "gru_centralized",
            )
        ),
        (
            {"methods": ("persistence",), "participation": 0.1},
            "--participation concerns none of the methods persistence",
        ),
        *(
            ({"methods": methods, name: 3}, f"--{name} concerns none of the methods ")
            for name, methods in (
                ("client_rounds", ("gru_centralized", "gru_fmtl", "split_learning")),
                ("server_rounds", ("split_learning", "gru_fedavg", "gru_gn")),
                ("client_batch_size", ("split_learning_fedavg", "gru_gn")),
                ("server_batch_size", ("gru_local", "persistence")),
                ("sampling_decay", ("gru_fedavg", "persistence")),
            )
        ),
        (
            {"methods": ("gru_fedavg",), "edges_per_chunk": "0"},
            "--edges_per_chunk concerns none of the methods gru_fedavg",
        ),
        ({"num_cpu_devices": 77}, "--num_cpu_devices=77: JAX is already in use"),
        ({"masked_loss": 1}, "--masked_loss=1: expected a bool"),
        ({"workdir": __file__}, "is a file; name a folder"),
        ({"dataset": "nowhere.npz"}, "nowhere.npz: no such file"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_runs(settings, words):
    jax.devices()  # what they are cannot be chosen from here on
    with pytest.raises(InputError) as raised:
        CNFGNNStudy(**settings).run()
    (line,) = str(raised.value).splitlines()
    assert words in line


@pytest.mark.parametrize(
    "settings",
    [
        {"methods": ("cnfgnn", "persistence"), "participation": 0.1},
        {"methods": ("gru_fmtl",), "given": frozenset({"participation"})},
        {"methods": ("gru_local",), "client_rounds": 3, "client_batch_size": 8},
        {"methods": ("gru_fmtl",), "client_batch_size": 8, "sampling_decay": 3.0},
        {"methods": ("gru_gn",), "server_batch_size": 8, "sampling_decay": 3.0},
        {"methods": ("gru_fedavg", "cnfgnn"), "server_rounds": 3},
        {"methods": ("fed_prox",), "client_rounds": 3, "sampling_decay": 3.0},
    ],
)
def test_what_a_method_reads_is_taken(settings):
    methods = CNFGNNStudy(**settings).chosen_methods()
    assert tuple(methods) == settings["methods"]


def test_a_servers_schedule_is_of_one_method_and_no_sweep():
    text = "adam,learning_rate=0.1,schedule=cosine,num_steps=9"
    study = CNFGNNStudy(server_optimizer=text)
    configs.check_optimizers(study, ["persistence", "cnfgnn"])
    with pytest.raises(InputError, match="give one method"):
        configs.check_optimizers(study, ["cnfgnn", "split_learning"])
    with pytest.raises(InputError, match="no --sweep"):
        configs.check_optimizers(dataclasses.replace(study, sweep="rounds"), ["cnfgnn"])


@pytest.mark.parametrize("method", ["cnfgnn", "gru_local", "gru_fedavg"])
def test_a_model_is_scored_by_the_options_that_it_was_trained_by(method, tmp_path):
    given = {"sampling_decay": 7.0, "client_batch_size": 5, "client_optimizer": "adamw"}
    given["client_rounds"] = 3
    if method == "cnfgnn":
        given |= {"exchange_bits": "8", "server_rounds": 3}
    if method == "gru_fedavg":
        del given["sampling_decay"]
        given["participation"] = 0.5
    if method != "gru_centralized":
        given["masked_loss"] = True
    values = configs.config_values(CNFGNNStudy(**given), method, 54, tmp_path)
    config = running.config_of(configs.paper.registered(method), values)
    saved = {"config": writers.to_jsonable(dataclasses.asdict(config)), "seeds": [3]}
    found = configs.flags_of(saved)
    assert CNFGNNStudy(**found).seeds == (3,)
    again = configs.config_values(CNFGNNStudy(**found), method, 54, tmp_path)
    assert running.config_of(configs.paper.registered(method), again) == config
