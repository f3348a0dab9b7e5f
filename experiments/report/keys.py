"""What the keys of `results.json` mean, for the legend of a report."""

from collections.abc import Mapping
from typing import Any

KEYS = {
    "test": "scores of the state of the best round on the test part, means over seeds",
    "test_std": "standard deviations over seeds of the same; null for one seed",
    "test_by_seed": "the same for each seed",
    "rmse": "root of the mean squared error, in the unit of the data; of CNFGNN over "
    "all readings, of SFL over those that are there",
    "mae": "mean absolute error, likewise",
    "mape": "mean absolute error as a share of the reading, percent",
    "masked": "errors over readings that are there, by minutes ahead",
    "all": "of all sensors, or over all steps ahead",
    "seen": "of the sensors that were trained on",
    "unseen": "of sensors that were only tested on",
    "rmse_by_horizon": "rmse one step ahead, two and so on; `_std` over seeds",
    "accuracy": "percent of right answers",
    "cross_entropy": "mean negative logarithm of the probability of the right class",
    "mean_accuracy": "accuracy averaged over clients, in percent; `_client_std` is "
    "the deviation over them",
    "best_5_percent": "accuracy of the best twentieth of the clients",
    "worst_5_percent": "accuracy of the worst twentieth of the clients",
    "best_round": "round whose state was tested",
    "num_rounds": "rounds that were run",
    "communication_bytes": "sent up to and down from the server until the best round",
    "communication_bytes_per_round": "in a round, the mean of all",
    "communication_bytes_in_all": "in all rounds, and before the first one",
    "bytes_to_target": "bytes until --target_rmse was reached on the validation part",
    "device_gflops": "10^9 operations of a client's forward pass for one window",
    "params_millions": "millions of parameters",
    "inference_seconds": "median of five predictions of the test nodes",
    "code": "the architecture as numbers",
    "search": "scores and costs of the search that found it",
    "seconds": "of training, without compiling",
    "compile_seconds": "of compiling the round",
    "config": "hyper-parameters of the method",
}


def legend(methods: Mapping[str, Any]) -> dict[str, str]:
    """The keys that stand somewhere in the entries of a run, with what they mean."""
    found = set(_keys(methods))
    return {key: said for key, said in KEYS.items() if key in found}


def _keys(tree: Any) -> list[str]:
    if not isinstance(tree, dict):
        return []
    inner = [key for x in tree.values() for key in _keys(x)]
    return [*tree, *inner]
