"""Strategies and baselines of `experiments.cnfgnn` as a user runs them."""

import pytest

from tests import binary
from tests.test_cnfgnn_binary import METHODS, Machine

STRATEGIES = ["centralized", "sl", "sl_fedavg", "at_without_fedavg", "at_fedavg"]
OF_STRATEGIES = [
    "gru_gn",
    "split_learning",
    "split_learning_fedavg",
    "at_without_fedavg",
    "cnfgnn",
]
GRUS = ["gru_centralized", "gru_local", "gru_fedavg", "gru_fmtl"]
HIDDEN = 53 * 4 * 4  # training windows x hidden size x float32, of one sensor
NUM_SENSORS, NUM_EDGES = 4, 3


def model_bytes(hidden_size, embedding_size, num_layers=1):
    """Of a GRU encoder-decoder in float32."""

    def gru(inputs, size):
        return 3 * size * (inputs + size) + 6 * size

    state = hidden_size + embedding_size
    size = gru(2, hidden_size) + gru(2, state) + state + 1
    more = gru(hidden_size, hidden_size) + gru(state, state)
    return 4 * (size + (num_layers - 1) * more)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def answers(machine):
    """Answers to many command lines, by name."""

    def line(name, *flags):
        line = machine.command_line(name, "--num_rounds=1", *flags)
        return [flag for flag in line if flag != f"--methods={','.join(METHODS)}"]

    lines = {
        "strategies": line("strategies", f"--strategy={','.join(STRATEGIES)}"),
        "baselines": line(
            "baselines",
            f"--methods={','.join(GRUS)}",
            "--gru_layers=2",
            "--fmtl_regulariser=frobenius",
        ),
        "both": line(
            "both",
            "--strategy=sl_fedavg",
            "--methods=gru_fmtl,split_learning_fedavg",
            "--average_every_step",
            "--server_batch_size=20",
            "--fmtl_weight=0.2",
            "--fmtl_sync_every=2",
        ),
        "unknown": line("bad", "--strategy=sl,split"),
        "twice": line("bad", "--strategy=sl,sl"),
        "nothing": line("bad", "--strategy="),
        "weight": line("bad", "--methods=gru_fmtl", "--fmtl_weight=-1"),
        "regulariser": line("bad", "--fmtl_regulariser=ridge"),
        "other task": line("bad", "--methods=sfl"),
    }
    return machine.run_many(lines)


def test_strategies_are_the_methods_of_table_10(machine, answers):
    status, out, err = answers["strategies"]
    assert (status, err) == (0, "")
    titles = ["GRU + GN (centralized)", "CNFGNN (SL)", "CNFGNN (SL + FedAvg)"]
    titles += ["CNFGNN (AT, w/o FedAvg)", "CNFGNN"]
    assert list(binary.table_of(out)) == titles
    found = machine.results("strategies")["methods"]
    assert list(found) == OF_STRATEGIES
    model = model_bytes(4, 4)
    per_round = {  # up and down alike
        "gru_gn": 0,
        "split_learning": NUM_SENSORS * 2 * HIDDEN,
        "split_learning_fedavg": NUM_SENSORS * (2 * HIDDEN + model),
        "at_without_fedavg": NUM_SENSORS * 2 * HIDDEN,
        "cnfgnn": NUM_SENSORS * (2 * HIDDEN + model),
    }
    for method, size in per_round.items():
        sent = found[method]["communication_bytes_in_all"]
        assert sent == {"up": size, "down": size}, method
    binary.assert_picture(machine.folder / "strategies" / "strategies.png")


def test_baselines_are_those_of_table_7(machine, answers):
    status, out, err = answers["baselines"]
    assert (status, err) == (0, "")
    titles = ["GRU (centralized)", "GRU (local)", "GRU + FedAvg", "GRU + FMTL"]
    assert list(binary.table_of(out)) == titles
    found = machine.results("baselines")["methods"]
    model = model_bytes(4, 0, num_layers=2)
    sent = {name: found[name]["communication_bytes_in_all"] for name in GRUS}
    assert sent == {
        "gru_centralized": {"up": 0, "down": 0},
        "gru_local": {"up": 0, "down": 0},
        "gru_fedavg": {"up": NUM_SENSORS * model, "down": NUM_SENSORS * model},
        "gru_fmtl": {"up": 0, "down": NUM_EDGES * model},
    }
    assert all(found[name]["config"]["num_layers"] == 2 for name in GRUS)
    config = found["gru_fmtl"]["config"]
    kept = {key: config[key] for key in ("regulariser", "weight", "sync_every")}
    assert kept == {"regulariser": "frobenius", "weight": 0.01, "sync_every": 5}
    decays = {name: found[name]["config"]["sampling_decay"] for name in GRUS}
    assert decays.pop("gru_fedavg") == 1.0
    assert len(set(decays.values())) == 1


def test_strategies_come_before_other_methods(machine, answers):
    assert answers["both"][0] == 0, answers["both"]
    found = machine.results("both")["methods"]
    assert list(found) == ["split_learning_fedavg", "gru_fmtl"]
    config = found["gru_fmtl"]["config"]
    kept = {key: config[key] for key in ("regulariser", "weight", "sync_every")}
    assert kept == {"regulariser": "laplacian", "weight": 0.2, "sync_every": 2}
    assert found["split_learning_fedavg"]["config"]["average_every_step"]
    sent = found["split_learning_fedavg"]["communication_bytes_in_all"]["up"]
    assert sent == NUM_SENSORS * (2 * HIDDEN + 3 * model_bytes(4, 4))  # 3 minibatches


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown", ["--strategy", "sl_fedavg", "only once"]),
        ("twice", ["--strategy", "only once"]),
        ("nothing", ["--strategy", "one or more"]),
        ("weight", ["--fmtl_weight=-1"]),
        ("regulariser", ["--fmtl_regulariser=ridge", "frobenius"]),
        ("other task", ["unknown method 'sfl'", "gru_fmtl"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(answers, name, words):
    binary.assert_refused(answers[name], words)
