"""Tables 2 to 10 of Meng, Rambhatla, Liu, KDD 2021; Table 1 counts datasets."""

from experiments.tables.papers import Dataset, Metric, Paper, Row, Table, of_test

DATASETS = {
    "pems_bay": Dataset(
        "PEMS-BAY", {"num_sensors": 325, "num_steps": 52116}, ("pems_bay_subset",)
    ),
    "metr_la": Dataset("METR-LA", {"num_sensors": 207, "num_steps": 34272}),
}
RMSE = of_test("RMSE (mph)", "rmse", 3)
ROUNDS = Metric("rounds", ("best_round",), 0, spread="best_round_by_seed")
TRAFFIC = Metric(
    "training traffic (GiB)",
    ("communication_bytes.up", "communication_bytes.down"),
    digits=3,
    scale=2.0**-30,
    spread="communication_bytes_by_seed",
)
GFLOPS = Metric("a device's forward pass (GFLOP)", ("device_gflops_as_printed",), 4)
INDUCTIVE = tuple(
    of_test(f"RMSE (mph), {sensors} sensors", f"{sensors}.rmse", 3)
    for sensors in ("all", "seen", "unseen")
)
WHOLE = {"train_fraction": None}
SMALL = {"hidden_size": 100, "num_layers": 1}
LARGE = {"hidden_size": 200, "num_layers": 2}
SIZES = {  # flags and config of the GRU baselines
    "": (WHOLE, {}),
    "63K": (WHOLE, SMALL),
    "727K": (WHOLE | {"gru_hidden_size": 200, "gru_layers": 2}, LARGE),
}


def rows_of(label: str, method: str, size: str, *values) -> tuple[Row, Row]:
    """A row for PEMS-BAY and one for METR-LA.

    Args:
      label: of the method, with {} where the size stands.
      method: its name in `results.json`.
      size: a key of `SIZES`.
      values: the paper's, all of PEMS-BAY and then all of METR-LA.
    """
    flags, config = SIZES[size]
    half = len(values) // 2
    labels = (label.format(size),)
    return tuple(
        Row(labels, dataset, method, own, flags, config)
        for dataset, own in zip(DATASETS, (values[:half], values[half:]), strict=True)
    )


def traffic_table(
    number: int, strategy: str, rows: tuple[Row, ...], note: str = ""
) -> Table:
    return Table(
        number,
        f"communication cost of {strategy}",
        ("method",),
        (ROUNDS, TRAFFIC),
        rows,
        f"Rounds and traffic are those up to the lowest validation loss.{note}",
    )


STRATEGIES = {  # title: method, table of its traffic, rounds and GiB there
    "AT + FedAvg": ("cnfgnn", 3, (2, 237.654, 46, 222.246)),
    "SL": ("split_learning", 4, (31, 350.366, 65, 307.627)),
    "SL + FedAvg": ("split_learning_fedavg", 5, (7, 80.200, 71, 343.031)),
    "AT, w/o FedAvg": ("at_without_fedavg", 6, (44, 5221.576, 49, 2434.985)),
}
FRACTIONS = (0.05, 0.25, 0.5, 0.75, 0.9)
FRACTION_RMSE = {  # method, and the RMSE at each share of the sensors
    "GRU (63K) + FedAvg": (
        "gru_fedavg",
        {
            "pems_bay": (5.087, 4.863, 4.847, 4.859, 4.866),
            "metr_la": (12.128, 11.993, 12.104, 12.014, 12.016),
        },
    ),
    "CNFGNN": (
        "cnfgnn",
        {
            "pems_bay": (5.869, 4.541, 4.598, 4.197, 3.942),
            "metr_la": (13.931, 12.013, 11.815, 11.676, 11.629),
        },
    ),
}

MISPRINT = (
    "The paper's METR-LA traffic of AT without FedAvg is that of 20 server rounds, "
    "where it prints 1."
)

PAPER = Paper(
    "CNFGNN",
    DATASETS,
    (
        traffic_table(
            2,
            "GRU + FMTL",
            (
                *rows_of(
                    "GRU ({}) + FMTL", "gru_fmtl", "63K", 104, 57.823, 279, 99.201
                ),
                *rows_of(
                    "GRU ({}) + FMTL", "gru_fmtl", "727K", 56, 359.292, 176, 722.137
                ),
            ),
        ),
        *(
            traffic_table(
                number,
                title,
                rows_of(title, method, "", *values),
                f" {MISPRINT}" if method == "at_without_fedavg" else "",
            )
            for title, (method, number, values) in STRATEGIES.items()
        ),
        Table(
            7,
            "traffic forecasts",
            ("method",),
            (RMSE,),
            (
                *rows_of(
                    "GRU (centralized, {})", "gru_centralized", "63K", 4.124, 11.730
                ),
                *rows_of(
                    "GRU (centralized, {})", "gru_centralized", "727K", 4.128, 11.787
                ),
                *rows_of("GRU + GN (centralized)", "gru_gn", "", 3.816, 11.471),
                *rows_of("GRU (local, {})", "gru_local", "63K", 4.010, 11.801),
                *rows_of("GRU (local, {})", "gru_local", "727K", 4.152, 12.224),
                *rows_of("GRU ({}) + FedAvg", "gru_fedavg", "63K", 4.512, 12.132),
                *rows_of("GRU ({}) + FedAvg", "gru_fedavg", "727K", 4.432, 12.058),
                *rows_of("GRU ({}) + FMTL", "gru_fmtl", "63K", 3.961, 11.548),
                *rows_of("GRU ({}) + FMTL", "gru_fmtl", "727K", 3.955, 11.570),
                *rows_of("CNFGNN", "cnfgnn", "", 3.822, 11.487),
            ),
        ),
        Table(
            8,
            "cost on a device and of communication",
            ("method",),
            (GFLOPS, TRAFFIC),
            (
                *rows_of(
                    "GRU ({}) + FMTL", "gru_fmtl", "63K", 0.159, 57.823, 0.159, 99.201
                ),
                *rows_of(
                    "GRU ({}) + FMTL",
                    "gru_fmtl",
                    "727K",
                    1.821,
                    359.292,
                    1.821,
                    722.137,
                ),
                *rows_of("CNFGNN", "cnfgnn", "", 0.162, 237.654, 0.162, 222.246),
            ),
            "GFLOP are the paper's, multiply-accumulates for one window of all 207 "
            "sensors of METR-LA; ours are counted in the same way.",
        ),
        Table(
            9,
            "inductive learning",
            ("method", "share of sensors trained on"),
            INDUCTIVE,
            tuple(
                Row(
                    (label, f"{fraction:.0%}"),
                    dataset,
                    method,
                    (rmse, None, None),
                    {"train_fraction": fraction},
                    SMALL if method == "gru_fedavg" else {},
                )
                for label, (method, by_dataset) in FRACTION_RMSE.items()
                for dataset, errors in by_dataset.items()
                for fraction, rmse in zip(FRACTIONS, errors, strict=True)
            ),
            "The paper prints the error of all sensors only.",
        ),
        Table(
            10,
            "training strategies",
            ("strategy",),
            (RMSE, TRAFFIC),
            (
                *rows_of("centralized", "gru_gn", "", 3.816, None, 11.471, None),
                *rows_of("SL", "split_learning", "", 3.914, 350.366, 12.186, 307.627),
                *rows_of(
                    *("SL + FedAvg", "split_learning_fedavg", ""),
                    *(4.383, 80.200, 11.631, 343.031),
                ),
                *rows_of(
                    *("AT, w/o FedAvg", "at_without_fedavg", ""),
                    *(4.003, 5221.576, 11.912, 2434.985),
                ),
                *rows_of("AT + FedAvg", "cnfgnn", "", 3.822, 237.654, 11.487, 222.246),
            ),
            MISPRINT,
        ),
    ),
)
