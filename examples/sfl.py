"""SFL against FedAvg on a small road network: sensors mix their models along roads."""

import fedjax_graph as fg
from fedjax_graph.data.traffic import windows
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask


def main() -> None:
    network = fg.load("synthetic", num_sensors=6, num_days=4)
    splits = windows.make_splits(network)
    ahead = network.step.words(windows.TARGET_STEPS)
    task = TrafficRNNTask(hidden_size=16, batch_size=64)  # one sensor is one client
    for name, settings in (
        ("fed_avg", {}),
        ("sfl", {"alpha": 0.5, "start": "personal"}),  # half its own, half mixed
    ):
        method = fg.get_method(name)
        algorithm = method.factory(method.config_type(task=task, **settings))
        result = fg.run(name, algorithm, splits, fg.RunConfig(num_rounds=5))
        print(f"{name}: MAE {result.test['mae'][0]:.2f} {network.unit} {ahead} ahead")


if __name__ == "__main__":
    main()
