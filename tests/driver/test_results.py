"""`results.json` as other tools read it, and the table."""

import json

import numpy as np
import pytest

from fedjax_graph.core.communication import Bytes, Ledger
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import results
from fedjax_graph.driver.rounds import RunResult

TEST_KEYS = ("rmse", "mae", "masked", "accuracy")  # the last is not there
ENTRY_KEYS = ("rmse_by_horizon", "accuracy_by_client")


def make_result(num_seeds):
    """Seed s has errors that are 1 + s times those of the first."""
    factors = 1 + np.arange(num_seeds, dtype=np.float32)
    masked = {"mae": 2 * factors, "rmse": 3 * factors, "mape": 4 * factors}
    return RunResult(
        best_state=None,
        test={
            "loss": factors,
            "rmse": 5 * factors,
            "mae": 6 * factors,
            "rmse_by_horizon": np.outer(factors, np.arange(12.0)),
            "masked": {at: masked for at in ("15", "30", "60", "all")},
        },
        best_round=np.array([3, 8, 5][:num_seeds], np.int32),
        num_rounds=9,
        communication=Ledger(rounds=((1, Bytes(up=10, down=7)),)),
        seconds=2.5,
        compile_seconds=1.5,
    )


def entry_of(num_seeds):
    config = {"sizes": (1, 2)}
    return results.method_entry(make_result(num_seeds), TEST_KEYS, config, ENTRY_KEYS)


def test_one_seed_has_no_deviation():
    entry = entry_of(1)
    masked = {"mae": 2.0, "rmse": 3.0, "mape": 4.0}
    assert entry["test"] == {
        "rmse": 5.0,
        "mae": 6.0,
        "masked": {at: masked for at in ("15", "30", "60", "all")},
    }
    assert entry["test_std"] is None
    assert (entry["best_round"], entry["seconds"]) == (3, 2.5)
    assert entry["communication_bytes"] == {"up": 30, "down": 21}
    assert entry["communication_bytes_by_seed"] is None
    assert entry["communication_bytes_in_all"] == {"up": 90, "down": 63}
    assert entry["communication_bytes_per_round"] == {"up": 10, "down": 7}
    assert entry["rmse_by_horizon"] == list(range(12))
    assert "accuracy_by_client" not in entry


def test_only_the_metrics_that_are_named_are_kept():
    entry = results.method_entry(make_result(1), ("mae",), {})
    assert entry["test"] == {"mae": 6.0}
    assert "rmse_by_horizon" not in entry


def test_leaves_are_means_over_seeds_and_deviations_the_same_tree():
    entry = entry_of(3)
    assert entry["test"]["rmse"] == pytest.approx(10.0)
    assert entry["test"]["masked"]["60"]["mape"] == pytest.approx(8.0)
    assert entry["test_std"]["rmse"] == pytest.approx(5 * np.std([1, 2, 3], ddof=1))
    assert entry["test_std"]["masked"]["all"]["mae"] == pytest.approx(2.0)
    assert entry["test_std"].keys() == entry["test"].keys()
    means = np.mean([1, 2, 3]) * np.arange(12)
    assert entry["rmse_by_horizon"] == pytest.approx(means.tolist())
    deviations = np.std([1, 2, 3], ddof=1) * np.arange(12)
    assert entry["rmse_by_horizon_std"] == pytest.approx(deviations.tolist())
    assert isinstance(entry["best_round"], int)
    assert entry["best_round"] == 5
    assert entry["best_round_by_seed"] == [3, 8, 5]
    mean = (3 + 8 + 5) / 3  # not of a whole round
    assert entry["communication_bytes"] == {"up": round(10 * mean), "down": 37}
    assert entry["communication_bytes_by_seed"] == [17 * 3, 17 * 8, 17 * 5]


def test_bytes_of_phases_and_of_what_comes_before_the_rounds():
    """100 at once, then 10 in each of four rounds, and nothing."""
    phases = (1, Bytes(up=10, down=5)), (5, Bytes())
    ledger = Ledger(Bytes(up=100), phases)
    result = make_result(3)._replace(communication=ledger)  # best rounds 3, 8, 5
    entry = results.method_entry(result, TEST_KEYS, {})
    up, down = (130 + 140 + 140) / 3, (15 + 20 + 20) / 3
    assert entry["communication_bytes"] == {"up": round(up), "down": round(down)}
    assert entry["communication_bytes_by_seed"] == [145, 160, 160]
    assert entry["communication_bytes_in_all"] == {"up": 140, "down": 20}
    assert entry["communication_bytes_per_round"] == {"up": 140 // 9, "down": 2}


def test_the_file_is_strict_json_with_hardware_and_versions(tmp_path):
    result = make_result(1)
    result.test["mae"] = np.array([np.nan])
    methods = {"cnfgnn": results.method_entry(result, TEST_KEYS, {})}
    settings = {"flags": {"seed": np.int64(3)}, "notes": ("cut",)}
    results.write_results(tmp_path, "metr_la", settings, methods)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "results.json").read_text()
    written = json.loads(text, parse_constant=refuse)
    assert written.keys() == {"dataset", "settings", "methods"}
    assert written["dataset"] == "metr_la"
    assert written["methods"]["cnfgnn"]["test"]["mae"] is None
    assert written["settings"]["flags"] == {"seed": 3}
    assert written["settings"]["notes"] == ["cut"]
    assert written["settings"]["hardware"]["num_cpus"] >= 1
    assert written["settings"]["hardware"]["precision"] == "float32"  # of a CPU
    assert {"python", *results.PACKAGES} == written["settings"]["versions"].keys()


def test_the_table_is_aligned():
    rows = [["persistence", "13.08"], ["CNFGNN", results.with_std(12.0, 0.25)]]
    assert results.format_table(["mph", "RMSE"], rows).splitlines() == [
        "mph                    RMSE",
        "-----------  --------------",
        "persistence           13.08",
        "CNFGNN       12.000 ± 0.250",
    ]
    assert results.with_std(12.0, None) == "12.000"


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"methods": [1]}', '{"methods": {"gcn": 1}}', "\0"),
        '{"methods": {"gcn": {"test": {"accuracy": 80.0}}}}',
        "[" * 10_000,
    ],
)
def test_results_of_another_shape_are_one_clear_line(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(InputError, match="results.json: expected the results of an"):
        results.read_methods(tmp_path, "cnfgnn")


def test_results_of_other_data_are_not_added_to(tmp_path):
    settings = {"command": "python -m experiments.sfl", "data": 5}
    results.write_results(tmp_path, "tiny", settings, {})
    # Of a version that kept no checksum of the graph.
    assert results.read_methods(tmp_path, "sfl", 5, {"graph": 7}) == {}
    results.write_results(tmp_path, "tiny", settings | {"graph": 7}, {})
    assert results.read_methods(tmp_path, "sfl", 5, {"graph": 7}) == {}
    for found in ((6, {"graph": 7}), (5, {"graph": 8})):
        with pytest.raises(InputError, match="the results are of other data"):
            results.read_methods(tmp_path, "sfl", *found)
