"""Strategies and baselines of `experiments.cnfgnn` as a user runs them."""

import json

import pytest

from experiments.studies.cnfgnn import check_readings
from experiments.studies.cnfgnn_output import exchange_curves
from fedjax_graph.core.errors import InputError
from tests.experiments import binary
from tests.experiments.test_cnfgnn import METHODS, Machine

pytestmark = pytest.mark.slow
GRUS = ["gru_centralized", "gru_fmtl"]
HIDDEN = 75 * 4 * 4  # training windows x hidden size x float32, of one sensor
NUM_SENSORS, NUM_EDGES = 4, 3


def model_bytes(hidden_size, embedding_size):
    """Of a GRU encoder-decoder in float32."""

    def gru(size):
        return 3 * size * (2 + size) + 6 * size

    state = hidden_size + embedding_size
    return 4 * (gru(hidden_size) + gru(state) + state + 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def answers(machine):
    """Answers to many command lines, by name."""

    def line(name, *flags, sizes_of=METHODS):
        line = machine.command_line(name, "--num_rounds=1", *flags, methods=sizes_of)
        line.remove(f"--methods={','.join(sizes_of)}")
        return line

    baselines = (
        f"--methods={','.join(GRUS)}",
        "--fmtl_regulariser=frobenius",
        "--fmtl_weight=0.02",
    )
    lines = {
        "strategies": line(
            "strategies",
            "--strategy=centralized,sl_fedavg",
            "--methods=persistence,gru_gn",
            "--average_every_step",
            "--server_batch_size=20",
            sizes_of=["gru_gn"],
        ),
        "baselines": line("baselines", *baselines, sizes_of=GRUS),
        "resumed": line("baselines", *baselines, "--resume", sizes_of=GRUS),
        "options": line(
            "options",
            "--strategy=at_fedavg,sl",
            "--methods=gru_centralized",
            "--masked_loss",
            "--server_dtype=bfloat16",
            "--exchange_bits=8",
            "--edges_per_chunk=3",
            "--target_rmse=1000",
        ),
        "target": line(
            *("target", "--methods=gru_fmtl", "--target_rmse=0.001"), sizes_of=GRUS
        ),
        "bits": line("bad", "--exchange_bits=7"),
        "dtype": line("bad", "--server_dtype=float16"),
        "chunk": line("bad", "--edges_per_chunk=-3"),
        "no target": line("bad", "--target_rmse=nan"),
        "unknown": line("bad", "--strategy=sl,split"),
        "twice": line("bad", "--strategy=sl,sl"),
        "nothing": line("bad", "--strategy="),
        "weight": line("bad", "--methods=gru_fmtl", "--fmtl_weight=-1"),
        "regulariser": line("bad", "--fmtl_regulariser=ridge"),
        "other task": line("bad", "--methods=fl_agcns"),
    }
    return machine.run_many(lines)


def test_strategies_are_the_methods_of_table_10(machine, answers):
    status, out, err = answers["strategies"]
    assert (status, err) == (0, "")
    titles = ["GRU + GN (centralized)", "CNFGNN (SL + FedAvg)", "persistence"]
    assert list(binary.table_of(out)) == titles
    found = machine.results("strategies")["methods"]
    assert list(found) == ["gru_gn", "split_learning_fedavg", "persistence"]
    size = NUM_SENSORS * (2 * HIDDEN + 4 * model_bytes(4, 4))  # 4 minibatches
    sent = [entry["communication_bytes_in_all"] for entry in found.values()]
    assert sent[:2] == [{"up": 0, "down": 0}, {"up": size, "down": size}]
    assert found["split_learning_fedavg"]["config"]["average_every_step"]
    decays = [found[name]["config"]["sampling_decay"] for name in list(found)[:2]]
    assert decays[0] == decays[1] == pytest.approx(1000 * (1 + 4) / 688)
    binary.assert_picture(machine.folder / "strategies" / "strategies.png")


def test_baselines_are_those_of_table_7(machine, answers):
    status, out, err = answers["baselines"]
    assert (status, err) == (0, "")
    assert list(binary.table_of(out)) == ["GRU (centralized)", "GRU + FMTL"]
    found = machine.results("baselines")["methods"]
    sent = [found[name]["communication_bytes_in_all"] for name in GRUS]
    size = NUM_EDGES * model_bytes(4, 0)
    assert sent == [{"up": 0, "down": 0}, {"up": 0, "down": size}]
    config = found["gru_fmtl"]["config"]
    kept = {key: config[key] for key in ("regulariser", "weight")}
    assert kept == {"regulariser": "frobenius", "weight": 0.02}
    assert config["task"]["local_epochs"] == 5
    assert not (machine.folder / "baselines" / "strategies.png").exists()


def test_finished_baselines_resumed_are_the_same(answers):
    status, out, err = answers["resumed"]
    assert (status, err) == (0, "")
    assert "round 1/1" not in out
    assert binary.table_of(out) == binary.table_of(answers["baselines"][1])


def test_options_beyond_the_paper(machine, answers):
    status, out, err = answers["options"]
    assert (status, err) == (0, "")
    found = machine.results("options")["methods"]
    names = ["cnfgnn", "split_learning", "gru_centralized"]
    assert list(found) == names
    configs = [found[name]["config"] for name in names]
    tasks = [config.get("task", config) for config in configs]
    assert [task["masked_loss"] for task in tasks] == [True] * 3
    for config in configs[:2]:
        assert (config["server_dtype"], config["exchange_bits"]) == ("bfloat16", 8)
        assert config["edges_per_chunk"] == 3
    rounded = HIDDEN * 8 // 16  # 4 bytes and a float32 scale, not 4 float32
    size = NUM_SENSORS * 2 * rounded
    averages = NUM_SENSORS * model_bytes(4, 4)
    sent = [found[name]["communication_bytes_per_round"] for name in names]
    assert sent[0] == {"up": size + averages, "down": size + averages}
    assert sent[1:] == [{"up": size, "down": size}, {"up": 0, "down": 0}]
    assert found["cnfgnn"]["bytes_to_target_by_seed"] == [2 * (size + averages)]
    reached = [found[name].get("bytes_to_target") for name in names]
    assert reached == [2 * (size + averages), 2 * size, None]
    binary.assert_picture(machine.folder / "options" / "communication.png")


def test_bytes_are_those_of_each_seed(tmp_path):
    """Rounds without validation are passed over; a stopped seed's lowest stays."""
    losses = [[4.0, 9.0], [5.0, 1.0], [float("nan"), 0.25]]
    records = [
        {"method": "sl", "round": round_, "validation_loss_by_seed": both}
        | {"validation_loss": sum(both) / 2}
        for round_, both in zip((1, 2, 4), losses, strict=True)
    ]
    records.insert(2, {"method": "sl", "round": 3, "train_loss": 0.1})
    late = {"round": 5, "validation_loss": 0.0, "validation_loss_by_seed": [0.0, 0.0]}
    records.append({"method": "sl"} | late)  # after the last checkpoint
    records.append({"method": "local", "round": 1, "validation_loss": 0.0})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    entries = {
        name: {
            "num_rounds": 4,
            "communication_bytes_per_round": {"up": up, "down": down},
        }
        for name, up, down in (("sl", 3, 4), ("local", 0, 0))
    }
    found = exchange_curves(tmp_path, entries, std=2.0)
    assert list(found) == ["sl"]
    assert found["sl"].sizes.tolist() == [7, 14, 28]
    assert found["sl"].rmse.tolist() == [[4, 6], [4, 2], [4, 1]]
    assert found["sl"].bytes_to(4.0) == [7, 14]
    assert found["sl"].bytes_to(1.5) == [None, 28]


def test_a_masked_loss_needs_readings(splits):
    check_readings("tiny", splits)
    first = int(splits["validation"].starts[0]) + 12  # 4 windows, so 15 steps
    silent = splits["train"].speed.at[:, first : first + 15].set(0)
    splits = {part: data._replace(speed=silent) for part, data in splits.items()}
    with pytest.raises(InputError, match="no reading to forecast in the validation"):
        check_readings("tiny", splits)


def test_a_target_that_is_not_reached_is_none(machine, answers):
    status, _, err = answers["target"]
    assert (status, err) == (0, "")
    assert machine.results("target")["methods"]["gru_fmtl"]["bytes_to_target"] is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bits", ["--exchange_bits=7", "32|16|8|4"]),
        ("dtype", ["--server_dtype=float16"]),
        ("chunk", ["--edges_per_chunk=-3", "auto, 0 for all"]),
        ("no target", ["--target_rmse=nan"]),
        ("unknown", ["--strategy", "sl_fedavg", "only once"]),
        ("twice", ["--strategy", "only once"]),
        ("nothing", ["--strategy", "one or more"]),
        ("weight", ["--fmtl_weight=-1"]),
        ("regulariser", ["--fmtl_regulariser=ridge", "frobenius"]),
        ("other task", ["unknown method 'fl_agcns'", "gru_fmtl"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    binary.assert_refused(answers[name], words)
