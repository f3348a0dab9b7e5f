"""What every study does, whichever system it is of."""

import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time

import jax
import pytest

import fedjax_graph as fg
from experiments import benchmark, cli, datasets
from experiments.robustness import RobustnessStudy
from experiments.studies import options, pictures, running, surroundings, sweeps
from experiments.studies.base import titles_of
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.fl_agcns import FLAGCNSStudy
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.sfl import SFLStudy
from experiments.studies.subgraphs import SubgraphStudy
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import mesh, optimizers, processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver import compile_for, results
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import tables
from tests.experiments import binary

SYSTEMS = (CNFGNNStudy, SFLStudy, GraphFLStudy, FLAGCNSStudy)
STUDIES = (*SYSTEMS, benchmark.BenchmarkStudy, datasets.DatasetsStudy)
BINARIES = ("cnfgnn", "sfl", "graphfl", "fl_agcns", "benchmark", "datasets")
OF_A_GRAPH = """
import fedjax_graph as fg
from fedjax_graph.data.graphs import synthetic

@fg.register_dataset("my_graph", kind="graphs", description="of a test")
def my_graph():
    graph = synthetic.node_graph(num_nodes=1600, num_classes=3, num_features=20)
    return graph._replace(name="my_graph")
"""


@dataclasses.dataclass(frozen=True)
class MomentumConfig(FedAvgConfig):
    """A config of a user's own for a factory of the library."""


@pytest.fixture(autouse=True)
def own_tables():
    with tables.kept():
        yield


@pytest.fixture
def my_momentum():
    """A user's method that is made by the library's factory."""
    name = "my_momentum"
    fg.register_method(name, fed_avg, MomentumConfig, title="My momentum")
    return name


@pytest.mark.parametrize("name", BINARIES)
def test_a_plugin_that_is_not_there_is_one_line_of_every_binary(
    name, monkeypatch, capsys
):
    """In this process, which absl and the hooks of a binary leave as it is."""
    monkeypatch.setattr(
        cli.app, "run", lambda main, flags_parser: main(flags_parser(sys.argv))
    )
    monkeypatch.setattr(cli, "_hush_event_loops", lambda: None)
    monkeypatch.setattr(cli.logging, "set_verbosity", lambda level: None)
    monkeypatch.setattr(sys, "argv", [name, "--plugin=nope.py"])
    binary.forget_flags()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"experiments.{name}").main()
    binary.forget_flags()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: plugin nope.py: no such file\n"


@pytest.mark.parametrize("study_type", STUDIES)
def test_plugins_are_loaded_before_anything_else(study_type):
    with pytest.raises(InputError, match=r"plugin nope\.py"):
        study_type(plugin=("nope.py",), dataset="nowhere").run()


def test_fl_agcns_runs_on_a_plugins_graph(tmp_path):
    plugin, workdir = tmp_path / "my_graphs.py", tmp_path / "run"
    plugin.write_text(OF_A_GRAPH)
    settings = {"num_epochs": 1, "num_retrain": 1, "methods": ("gcn",)}
    entries = FLAGCNSStudy(
        dataset="my_graph", plugin=(str(plugin),), workdir=str(workdir), **settings
    ).run()
    assert list(entries) == ["gcn"]
    assert json.loads((workdir / "results.json").read_text())["dataset"] == "my_graph"


def test_a_users_method_is_told_by_its_registration(my_momentum):
    chosen = SFLStudy(methods=("fed_avg", my_momentum)).chosen_methods()
    assert chosen == ["fed_avg", my_momentum]
    assert GraphFLStudy(methods=(my_momentum,)).chosen_methods() == [my_momentum]
    assert CNFGNNStudy(methods=(my_momentum,)).chosen_methods() == [my_momentum]
    titles = titles_of(["sfl_star", "fed_avg"], {"fed_avg": "FL"})
    assert titles == {"sfl_star": "SFL*", "fed_avg": "FL", my_momentum: "My momentum"}


def test_fl_agcns_refuses_a_users_method(my_momentum, tmp_path):
    workdir = tmp_path / "run"
    study = FLAGCNSStudy(methods=("gcn", my_momentum), workdir=str(workdir))
    with pytest.raises(InputError, match="my_momentum: fl_agcns runs searches and n"):
        study.run()
    assert not workdir.exists()


SCHEDULED = "adam,schedule=cosine"


@pytest.mark.parametrize(
    ("study_type", "settings", "words"),
    [
        *(
            (study_type, {name: value}, f"--{name}={value}: {reason}")
            for study_type in SYSTEMS
            for name, value, reason in (
                (
                    "server_optimizer",
                    SCHEDULED,
                    "give num_steps, those of the",
                ),
                ("server_optimizer", "adan", "optimizer name 'adan': unknown"),
                ("server_optimizer", "", "expected a text that is not empty"),
                ("profile", "a\udcff", "expected text in UTF-8"),
            )
        ),
        (
            CNFGNNStudy,
            {"client_optimizer": SCHEDULED, "methods": ("split_learning",)},
            "split_learning steps on from round to round: give num_steps",
        ),
        (SFLStudy, {"clients_per_chunk": "few"}, "clients_per_chunk=few: expected"),
        (FLAGCNSStudy, {"clients_per_chunk": "0"}, "clients_per_chunk=0: expected"),
        (SFLStudy, {"given": ("dataset",)}, "expected a frozenset of names of opt"),
        (SFLStudy, {"given": frozenset({"datset"})}, "expected a frozenset of names"),
        (SFLStudy, {"client_graph": "none", "methods": ("fed_avg",)}, "concerns none"),
        (benchmark.BenchmarkStudy, {"peer": True}, "--peer needs --peer_script=FILE"),
        *(
            (benchmark.BenchmarkStudy, {name: value}, f"--{name}: {reason}")
            for name, value, reason in (
                ("compile_for", "h200x1", "what is here is measured"),
                ("coordinator", "here:1", "the benchmarks run in one process"),
                ("profile", "trace", "the binaries trace their rounds"),
            )
        ),
        (SFLStudy, {"client_optimizer": 3}, "--client_optimizer=3: expected a str"),
        *(
            (study_type, {"compile_for": "h200"}, "compile_for=h200: expected a chip")
            for study_type in SYSTEMS
        ),
        (
            CNFGNNStudy,
            {"compile_for": "v5e:2x2", "methods": ("all",)},
            "--compile_for: name the methods",
        ),
        (
            GraphFLStudy,
            {"compile_for": "v5e:2x2", "eval_only": True},
            "--compile_for compiles what trains, not --eval_only",
        ),
        (
            CNFGNNStudy,
            {"compile_for": "v5e:2x2", "sweep": "rounds"},
            "--compile_for compiles one run, not --sweep",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    tmp_path, study_type, settings, words
):
    workdir = tmp_path / "run"
    methods = {"methods": ("fed_adam",)} if study_type is SFLStudy else {}
    if study_type in SYSTEMS:
        settings = methods | settings | {"workdir": str(workdir)}
    with pytest.raises(InputError) as refusal:
        study_type(**settings).run()
    assert words in str(refusal.value)
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("study_type", "options", "expected"),
    [
        *((study_type, {}, [study_type.system]) for study_type in SYSTEMS),
        (SubgraphStudy, {}, ["local"]),
        (SFLStudy, {"methods": ("fed_avg",)}, ["fed_avg"]),
        (
            CNFGNNStudy,
            {"strategy": ("sl", "at_fedavg")},
            ["split_learning", "cnfgnn"],
        ),
        (
            CNFGNNStudy,
            {"strategy": ("sl",), "methods": ("gru_fedavg", "cnfgnn"), "gru_layers": 2},
            ["split_learning", "gru_fedavg", "cnfgnn"],
        ),
        (FLAGCNSStudy, {"code": "5,6,0,5"}, ["code"]),
        (
            FLAGCNSStudy,
            {"code": "5,6,0,5", "methods": ("fl_agcns",)},
            ["fl_agcns", "code"],
        ),
        (
            SubgraphStudy,
            {
                "methods": ("fed_gta", "fed_prox"),
                "method_settings": ("fed_gta.kappa=0.3", "fed_prox.proximal_weight=1"),
            },
            ["fed_gta", "fed_prox"],
        ),
    ],
)
def test_the_methods_of_a_run_are_compiled(monkeypatch, study_type, options, expected):
    def compile_all(methods, run_one):
        raise compile_for.Compiled([{"method": method} for method in methods])

    monkeypatch.setattr(running, "compile_all", compile_all)
    monkeypatch.setattr(study_type, "set_up_jax", lambda *args, **settings: None)
    study = study_type(compile_for="v5e:2x2", **options)
    assert [record["method"] for record in study.run()] == expected


def test_what_has_no_round_is_not_compiled():
    def run_one(method):
        if method == "sfl":
            raise compile_for.Compiled([{"method": method}])

    with pytest.raises(compile_for.Compiled) as done:
        running.compile_all(["sfl", "sfl"], run_one)
    assert done.value.records == [{"method": "sfl"}] * 2
    with pytest.raises(InputError, match="--compile_for: local has no round"):
        running.compile_all(["sfl", "local"], run_one)


def test_an_optimizer_may_be_given_as_a_config():
    momentum = fg.OptimizerConfig("sgd", 0.3, momentum=0.5)
    study = SFLStudy(client_optimizer=momentum)
    assert study.client_steps(fg.OptimizerConfig("adam", 0.1)) == momentum
    recorded = json.loads(json.dumps(study.record()))["client_optimizer"]
    assert recorded == dataclasses.asdict(momentum)
    with pytest.raises(InputError, match="give num_steps, those of the server"):
        SFLStudy(
            server_optimizer=fg.OptimizerConfig("adam", 0.1, schedule="cosine")
        ).server_steps(momentum)


@pytest.mark.parametrize(
    "chosen",
    [
        fg.OptimizerConfig("adam", 0.1),
        fg.OptimizerConfig("sgd", 0.3, momentum=0.5, clip_norm=2.0, stateful=True),
    ],
)
def test_a_command_line_says_all_of_an_optimizer(chosen):
    """Whatever the study that reads it steps with by default."""
    _, _, text = options.flag("client_optimizer", chosen).partition("=")
    for name in ("adam", "sgd"):
        default = fg.OptimizerConfig(name, 0.01, momentum=0.9, weight_decay=5e-4)
        assert optimizers.parse(text, default) == chosen


def test_a_folder_may_be_scored_that_is_not_writable(monkeypatch, tmp_path):
    study = CNFGNNStudy(workdir=str(tmp_path), eval_only=True)
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    with study.holding_folders():
        assert study.make_workdir("tiny") == tmp_path
    resumed = dataclasses.replace(study, eval_only=False, resume=True)
    with pytest.raises(InputError, match="is not writable; name another folder"):
        resumed.make_workdir("tiny")


def test_the_folder_of_the_environment_is_read_when_a_study_is_made(monkeypatch):
    monkeypatch.setenv("FEDJAX_GRAPH_DATA", "one")
    assert SFLStudy().data_dir == "one"
    monkeypatch.setenv("FEDJAX_GRAPH_DATA", "two")
    assert SFLStudy().data_dir == SFLStudy().record()["data_dir"] == "two"
    assert SFLStudy(data_dir="three").data_dir == "three"
    monkeypatch.setenv("FEDJAX_GRAPH_DATA", "")
    assert SFLStudy().data_dir is None
    monkeypatch.delenv("FEDJAX_GRAPH_DATA")
    assert SFLStudy().data_dir is None


@pytest.fixture
def cache():
    """JAX's setting, which is put back."""
    before = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    yield lambda: jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def test_programs_are_kept_unless_told_otherwise(cache, monkeypatch, tmp_path):
    chosen = cache()
    SFLStudy()._keep_programs()
    assert cache() == chosen  # the environment's
    SFLStudy(compilation_cache=str(tmp_path / "mine"))._keep_programs()
    assert cache() == str(tmp_path / "mine")
    SFLStudy(compilation_cache="off")._keep_programs()
    assert cache() is None
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path))
    benchmark.BenchmarkStudy()._keep_programs()
    assert cache() is None, "a benchmark measures compiling"
    SFLStudy()._keep_programs()
    assert cache() == str(tmp_path / "programs")
    monkeypatch.setattr(processes, "count", lambda: 2)
    SFLStudy()._keep_programs()
    assert cache() is None, "of several processes the first alone would keep them"
    SFLStudy(compilation_cache=str(tmp_path / "mine"))._keep_programs()
    assert cache() == str(tmp_path / "mine")


def test_programs_that_nobody_reads_are_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path))
    folder = pathlib.Path(surroundings.make_programs_folder())
    names, now = ("old", "read", "new"), time.time()
    for name in names:
        (folder / name).touch()
    long_ago = now - surroundings.UNUSED_SECONDS - 60
    os.utime(folder / "old", (long_ago, long_ago))
    os.utime(folder / "read", (now, long_ago))
    assert surroundings.make_programs_folder() == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["new", "read"]
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(folder / "new"))
    assert surroundings.make_programs_folder() is None
    said = capsys.readouterr().out
    assert said.startswith("note: compiled programs are not kept: ")
    assert said.endswith("new/programs: Not a directory\n")


def test_small_programs_are_kept_unless_the_environment_says_otherwise(
    cache, monkeypatch
):
    name = "jax_persistent_cache_min_compile_time_secs"
    monkeypatch.setenv(name.upper(), "2")
    jax.config.update(name, 2)
    SFLStudy()._keep_programs()
    assert getattr(jax.config, name) == 2
    monkeypatch.delenv(name.upper())
    SFLStudy()._keep_programs()
    assert getattr(jax.config, name) == 0


@pytest.mark.parametrize(
    ("backend", "target", "expected"),
    [
        ("cpu", None, "float32"),
        ("gpu", None, "tf32"),
        ("tpu", None, "bfloat16"),
        ("cpu", "h200x1", "tf32"),
        ("cpu", "v5e:2x2", "bfloat16"),
    ],
)
def test_the_automatic_precision_is_that_of_what_computes(
    monkeypatch, backend, target, expected
):
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    study = SFLStudy(precision="auto", compile_for=target)
    assert study.precision_in_effect() == expected
    asked = dataclasses.replace(study, precision="tf32")
    assert asked.precision_in_effect() == "tf32"
    is_cpu = expected == "float32"
    assert asked.precision_computed() == ("float32" if is_cpu else "tf32")


@pytest.mark.parametrize("name", ["compilation_cache", "profile"])
def test_a_file_is_no_folder(tmp_path, name):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(InputError, match=f"--{name}={path} is a file; name a folder"):
        SFLStudy(**{name: str(path)}).set_up_jax()


def test_double_precision_is_refused():
    with jax.enable_x64(True), pytest.raises(InputError, match="JAX_ENABLE_X64 is set"):
        SFLStudy().set_up_jax()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("auto", "float32"), ("tf32", "tensorfloat32"), ("bfloat16", "bfloat16")],
)
def test_the_precision_that_is_in_effect_is_on_record(monkeypatch, chosen, said):
    """JAX has what was chosen; a CPU's record says float32 all the same."""
    before = jax.config.jax_default_matmul_precision
    with mesh.restored():
        jax.devices()  # in use, so that the tests after it have all of them
        SFLStudy(precision=chosen, num_cpu_devices=1).set_up_jax()
        assert jax.config.jax_default_matmul_precision == said
        assert results.precision() == "float32"
        monkeypatch.setattr(mesh, "backend", lambda: "tpu")
        assert results.precision() == said
    jax.config.update("jax_default_matmul_precision", before)


def test_scores_stay_where_a_later_method_fails():
    written = []

    def run_one(method):
        if method == "diverges":
            raise InputError("the training loss is not finite")
        return None, {"test": {"loss": len(method)}}

    def write(entries):
        written.append(dict(entries))

    study = CNFGNNStudy()
    with pytest.raises(InputError):
        running.run_all(study, ["a", "bc", "diverges", "d"], run_one, {}, write)
    entries = {"a": {"test": {"loss": 1}}, "bc": {"test": {"loss": 2}}}
    assert written == [{"a": entries["a"]}, entries]
    scored = dataclasses.replace(study, eval_only=True)
    assert running.run_all(scored, ["a", "bc"], run_one, {}, write)[1] == entries
    with pytest.raises(InputError):  # what is on record is not touched meanwhile
        running.run_all(study, ["a", "diverges"], run_one, entries, write)
    assert len(written) == 2


KEPT = {"client_optimizer": "adam,schedule=constant,stateful=true"}
NOT_KEPT = "{}: optimizer stateful=True: onl"
HIDDEN = {"secure_aggregation": "masks"}


@pytest.mark.parametrize(
    ("study_type", "methods", "options", "reason"),
    [
        (CNFGNNStudy, ("gru_fedavg", "gru_fmtl"), KEPT, NOT_KEPT),
        (SFLStudy, ("fed_avg", "scaffold"), HIDDEN, "{}'s clients send control"),
        (GraphFLStudy, ("fl", "graphfl"), KEPT | {"first_order": True}, NOT_KEPT),
        (SubgraphStudy, ("fed_avg", "graphfl"), KEPT, NOT_KEPT),
    ],
)
def test_a_later_method_is_refused_before_the_first_is_trained(
    monkeypatch, tmp_path, study_type, methods, options, reason
):
    monkeypatch.setattr(running.rounds, "run", lambda *_, **__: pytest.fail("trained"))
    study = study_type(methods=methods, workdir=str(tmp_path / "run"), **options)
    with pytest.raises(InputError, match=reason.format(methods[1])):
        study.run()


def test_two_runs_do_not_share_a_folder(tmp_path):
    study = CNFGNNStudy(workdir=str(tmp_path / "run"))
    with study.holding_folders():
        folder = study.make_workdir("tiny")
        with (
            study.holding_folders(),
            pytest.raises(InputError, match="in use by process"),
        ):
            study.make_workdir("tiny")
        (folder / "metrics.jsonl").touch()
        scored = dataclasses.replace(study, eval_only=True)
        with scored.holding_folders():
            scored.make_workdir("tiny")
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    with study.holding_folders(), pytest.raises(InputError, match="already holds"):
        study.make_workdir("tiny")


@pytest.mark.parametrize("study_type", STUDIES)
def test_whole_numbers_have_an_upper_limit(study_type):
    for name in options.options_of(study_type):
        kind = options.kind_of(study_type, name)
        if kind is int and name != "seed":
            with pytest.raises(InputError, match=f"--{name}=10000000000: expected "):
                study_type(**{name: 10**10})


def test_a_config_says_what_older_checkpoints_lack():
    """Of the configs that it holds too, whatever they were given."""
    config = FedAvgConfig(
        SubgraphTask(3, 2, optimizer=OptimizerConfig("adam", 0.01)),
        server_optimizer=OptimizerConfig("yogi"),
    )
    defaults = running.config_defaults(config)
    assert defaults["task"]["optimizer"]["stateful"] is False
    assert defaults["task"]["optimizer"]["name"] == OptimizerConfig().name
    assert defaults["server_optimizer"]["stateful"] is False
    assert "num_features" not in defaults["task"]  # has no default
    assert defaults["participation"] == 1.0


def test_the_last_rate_of_a_schedule_is_another_field():
    steps = "sgd,schedule=cosine,last_learning_rate=0.001"
    study = SFLStudy(learning_rate=0.1, client_optimizer=steps)
    found = study.client_steps(OptimizerConfig(learning_rate=0.1))
    assert (found.learning_rate, found.last_learning_rate) == (0.1, 0.001)


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (SFLStudy(learning_rate=0.1, client_optimizer="adam,learning_rate=0.01"), ""),
        (SubgraphStudy(weight_decay=0.1, client_optimizer="adam,weight_decay=0"), ""),
        (
            SFLStudy(learning_rate=0.1, client_optimizer=OptimizerConfig("adam", 0.2)),
            "",
        ),
        (SFLStudy(client_optimizer="adam,stateful"), "stateful has no value, as in"),
        (SFLStudy(client_optimizer="adm"), r"is adam meant\?"),
    ],
)
def test_what_an_optimizer_says_twice_or_not_at_all_is_refused(study, words):
    with pytest.raises(InputError, match=words or "give the .* give it once"):
        study.client_steps(OptimizerConfig())


def test_a_part_of_a_sweep_is_of_its_folder_which_nobody_else_has(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("FEDJAX_GRAPH_DATA", raising=False)
    part, seen = CNFGNNStudy(methods=("cnfgnn",), workdir=str(tmp_path)), []

    def run_one(study, folder):
        seen.append(study.command())
        resumed = dataclasses.replace(study, resume=True)
        with resumed.holding_folders(), pytest.raises(InputError, match="is in use by"):
            resumed.make_workdir("tiny")
        return [{"folder": folder.name}]

    rows = sweeps.run({"1-1": part, "1-2": part}, run_one, tmp_path)
    assert rows == json.loads((tmp_path / "sweep.json").read_text())
    command = "python -m experiments.cnfgnn --workdir={} --methods=cnfgnn"
    assert seen == [command.format(tmp_path / row["folder"]) for row in rows]


def test_a_resumed_sweep_that_stops_keeps_the_rows_on_record(tmp_path):
    part = CNFGNNStudy(methods=("cnfgnn",), workdir=str(tmp_path))
    parts, value = {"1-1": part, "1-2": part}, 1

    def run_one(study, folder):
        if value == 2 and folder.name == "1-2":
            raise InputError("in use")
        return [{"folder": folder.name, "value": value}]

    def on_record():
        return json.loads((tmp_path / "sweep.json").read_text())

    before = sweeps.run(parts, run_one, tmp_path)
    for value in (2, 3):
        if value == 2:
            with pytest.raises(InputError, match="in use"):
                sweeps.run(parts, run_one, tmp_path)
            assert on_record() == before
        else:
            rows = sweeps.run({"1-1": part}, run_one, tmp_path)
            assert on_record() == rows == [{"folder": "1-1", "value": 3}]


@pytest.mark.parametrize(
    "study",
    [
        GraphFLStudy(outer_rate=0.5, server_optimizer="adam,learning_rate=0.01"),
        GraphFLStudy(inner_rate=0.5, client_optimizer="sgd,learning_rate=0.01"),
        GraphFLStudy(local_rate=0.5, client_optimizer="sgd,learning_rate=0.01"),
        FLAGCNSStudy(weight_decay=0.5, server_optimizer="adam,weight_decay=0"),
        FLAGCNSStudy(learning_rate=0.5, server_optimizer="adam,learning_rate=0.1"),
    ],
)
def test_a_rate_by_another_flag_is_refused_beside_an_optimizers(study):
    check = getattr(study, "check_given", None) or study.check
    with pytest.raises(InputError, match="both give the .*; give it once"):
        check()


def test_a_title_does_not_give_all_methods_the_seeds_of_the_last():
    study = SubgraphStudy(seed=2, num_seeds=3)
    now, earlier = {}, {"flags": SubgraphStudy(num_seeds=3).record()}
    for entries, words in (
        ({"fed_avg": now}, "seeds 2 to 4"),
        ({"fed_gta": {"flags": study.record()}, "fed_avg": now}, "seeds 2 to 4"),
        ({"fed_gta": earlier, "fed_avg": now}, "seeds differ by method"),
    ):
        look = pictures.look(study, "cora", entries, {"fed_avg": "FedAvg"})
        assert look.title == f"cora, {words}"
        assert look.methods[-1] == "FedAvg"


@pytest.mark.parametrize("optimizer", [None, "adam,weight_decay=0"])
@pytest.mark.parametrize("methods", [None, ("gcn",), ("fl_random",), ("fl_gradient",)])
def test_the_short_run_has_a_command_that_is_not_refused(methods, optimizer):
    study = FLAGCNSStudy(methods=methods, server_optimizer=optimizer).resolved()
    study.check_given()
    study.check_methods()


@pytest.mark.parametrize(
    ("study", "record", "words"),
    [
        (SFLStudy, "sweep.json", "holds a sweep, not a single run"),
        (SubgraphStudy, "robustness.json", "holds curves of robustness, not a single"),
        (GraphFLStudy, "robustness.json", "holds curves of robustness, not a single"),
        (RobustnessStudy, "results.json", "holds a single run, not curves of"),
    ],
)
@pytest.mark.parametrize("how", ["resume", "eval_only"])
def test_a_folder_of_another_kind_is_refused(tmp_path, study, record, words, how):
    (tmp_path / record).touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match=words):
        study(workdir=str(tmp_path), **{how: True}).make_workdir("tiny")


@pytest.mark.parametrize("study_type", [*SYSTEMS, SubgraphStudy])
def test_a_split_is_of_a_run_that_is_scored(study_type):
    with pytest.raises(InputError, match="--split needs --eval_only"):
        study_type(split="train")
    assert study_type(split="train", eval_only=True).split == "train"


def test_a_new_run_that_was_to_be_resumed_says_so(capsys, tmp_path):
    study = CNFGNNStudy(workdir=str(tmp_path), resume=True)
    study.make_workdir("tiny")
    assert "holds no run to resume; this is a new run" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").touch()
    study.make_workdir("tiny")
    assert not capsys.readouterr().out


def test_results_of_another_binary_are_not_added_to(tmp_path):
    settings = {"command": "python -m experiments.sfl --num_rounds=1", "data": 5}
    results.write_results(tmp_path, "tiny", settings, {})
    assert results.read_methods(tmp_path, "sfl", 5) == {}
    with pytest.raises(InputError, match="the results are of sfl, not of cnfgnn; name"):
        results.read_methods(tmp_path, "cnfgnn")


def test_graphfl_refuses_clients_without_a_node_to_judge_by(tmp_path):
    study = GraphFLStudy(
        labels_per_class=5,
        num_test=80,
        num_clients=50,
        methods=("fl", "graphfl"),
        workdir=str(tmp_path),
    )
    with pytest.raises(InputError, match="none has one left for graphfl's outer step"):
        study.run()
