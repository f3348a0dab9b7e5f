"""CNFGNN on a small synthetic road network, beside a forecast that changes nothing."""

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.data.traffic import synthetic, windows
from fedjax_graph.driver.rounds import RunConfig, run

SETTINGS = {  # what differs from the paper's, whose model is larger
    "hidden_size": 16,
    "gn_layers": 1,
    "gn_mlp_sizes": (32, 32),
    "client_learning_rate": 0.01,
    "server_learning_rate": 0.01,
    "sampling_decay": 10.0,  # steps until the decoder is mostly on its own
}


def main() -> None:
    # One sensor is one client: speeds [T, N] and a graph of the roads between them.
    network = synthetic.traffic_network(num_sensors=6, num_days=4)
    splits = windows.make_splits(network)  # 12 readings in, 12 to forecast
    rmse = {}
    for name, values, num_rounds in (
        ("persistence", {}, 0),
        ("cnfgnn", SETTINGS, 4),
    ):
        algorithm = get_method(name).factory(make_config(name, values))
        result = run(name, algorithm, splits, RunConfig(num_rounds))
        rmse[name] = float(result.test["rmse"][0])  # the first seed's
        sent = result.communication
        print(f"{name}: RMSE {rmse[name]:.2f} mph, {sent.up} bytes up a round")
    print(f"gain: {rmse['persistence'] - rmse['cnfgnn']:.2f} mph")


if __name__ == "__main__":
    main()
