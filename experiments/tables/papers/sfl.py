"""Tables 1 to 4 of Chen, Long, Wu, Zhou, Jiang, IJCAI 2022."""

from experiments.tables.papers import Dataset, Paper, Row, Table, of_test

DATASETS = {
    "metr_la": Dataset("METR-LA", {"num_sensors": 207, "num_steps": 34272}),
    "pems_bay": Dataset(
        "PEMS-BAY", {"num_sensors": 325, "num_steps": 52116}, ("pems_bay_subset",)
    ),
    "pems_d4": Dataset("PEMS-D4", {"num_sensors": 307, "num_steps": 16992}),
    "pems_d8": Dataset("PEMS-D8", {"num_sensors": 170, "num_steps": 17856}),
    "cifar10": Dataset("CIFAR-10", {"num_images": 50000, "num_test_images": 10000}),
}
MAE = of_test("MAE", "mae", 2)
MAPE = of_test("MAPE (%)", "mape", 2)
RMSE = of_test("RMSE", "rmse", 2)
ACCURACY = of_test("accuracy (%)", "mean_accuracy", 2)
OF_CLIENTS = tuple(
    of_test(f"{title} (%)", key, 2, spread=f"test.{key}_client_std")
    for title, key in (
        ("mean accuracy", "mean_accuracy"),
        ("best 5 %", "best_5_percent"),
        ("worst 5 %", "worst_5_percent"),
    )
)

# Title: method, and MAE, MAPE and RMSE on each dataset. The paper quotes the last two
# methods, of STGCN with METR-LA's figures for PEMS-BAY.
ON_TRAFFIC = {
    "FedAvg": (
        "fed_avg",
        {
            "metr_la": (7.03, 21.63, 10.81),
            "pems_bay": (3.62, 10.65, 7.26),
            "pems_d4": (44.96, 30.03, 59.97),
            "pems_d8": (36.76, 21.04, 49.14),
        },
    ),
    "FedAtt": (
        "fed_att",
        {
            "metr_la": (6.89, 23.54, 10.55),
            "pems_bay": (3.26, 5.5, 6.41),
            "pems_d4": (45.53, 30.15, 60.68),
            "pems_d8": (35.8, 23.27, 47.75),
        },
    ),
    "SFL": (
        "sfl",
        {
            "metr_la": (5.22, 16.55, 8.98),
            "pems_bay": (2.96, 7.62, 5.95),
            "pems_d4": (45.86, 56.31, 59.0),
            "pems_d8": (32.95, 20.98, 46.03),
        },
    ),
    "SFL*": (
        "sfl_star",
        {
            "metr_la": (5.26, 16.77, 8.95),
            "pems_bay": (3.02, 7.42, 6.04),
            "pems_d4": (40.75, 31.06, 59.45),
            "pems_d8": (35.82, 34.68, 47.82),
        },
    ),
    "STGCN": (
        None,
        {
            "metr_la": (4.59, 12.7, 9.4),
            "pems_bay": (4.59, 12.7, 9.4),
            "pems_d4": (25.15, None, 38.29),
            "pems_d8": (18.88, None, 27.87),
        },
    ),
    "Graph WaveNet": (
        None,
        {
            "metr_la": (3.53, 10.01, 7.37),
            "pems_bay": (1.95, 4.63, 4.52),
            "pems_d4": (18.71, 13.45, 30.04),
            "pems_d8": (14.39, 9.4, 23.03),
        },
    ),
}
# By shards, of each method: accuracies of all clients, the best and the worst 5 %.
ON_IMAGES = {
    2: {
        "fed_avg": ((18.55, 21.74), (73.2, 10.93), (0, 0)),
        "fed_att": ((10.08, 24.46), (90.0, 20.0), (0, 0)),
        "fed_prox": ((12.49, 21.99), (74.2, 19.65), (0, 0)),
        "scaffold": ((20.2, 26.73), (90.4, 1.85), (0, 0)),
        "fed_per": ((20.24, 18.52), (78.3, 14.26), (0, 0)),
        "lg_fed_avg": ((16.73, 22.01), (67.31, 12.68), (0, 0)),
        "sfl": ((54.25, 21.72), (100, 0), (6.2, 2.22)),
        "sfl_star": ((50.54, 29.52), (100, 0), (0, 0)),
    },
    5: {
        "fed_avg": ((32.95, 17.61), (67.4, 3.98), (2.2, 1.47)),
        "fed_att": ((28.25, 6.02), (52.8, 0.75), (1.4, 0.8)),
        "fed_prox": ((30.11, 14.85), (57.4, 1.85), (4.0, 1.9)),
        "scaffold": ((30.16, 13.66), (57.4, 5.57), (2.4, 2.87)),
        "fed_per": ((34.59, 18.26), (69.25, 4.68), (4.29, 1.24)),
        "lg_fed_avg": ((31.75, 14.35), (67.24, 3.53), (2.73, 1.95)),
        "sfl": ((45.03, 15.66), (75.2, 4.26), (9.2, 5.53)),
        "sfl_star": ((36.18, 12.74), (62.6, 1.02), (12.2, 2.64)),
    },
    10: {
        "fed_avg": ((46.33, 11.69), (69.4, 5.0), (20.4, 5.54)),
        "fed_att": ((40.0, 8.94), (52.0, 4.0), (12.16, 1.4)),
        "fed_prox": ((45.85, 11.55), (68.2, 1.94), (21.0, 3.22)),
        "scaffold": ((45.49, 11.36), (67.4, 2.24), (21.6, 2.87)),
        "fed_per": ((46.65, 10.71), (72.73, 3.71), (31.95, 4.24)),
        "lg_fed_avg": ((45.63, 12.22), (65.13, 3.21), (26.23, 3.17)),
        "sfl": ((51.79, 14.04), (78.8, 2.56), (23.0, 4.9)),
        "sfl_star": ((44.2, 11.85), (67.4, 2.24), (20.0, 3.85)),
    },
    20: {
        "fed_avg": ((81.8, 4.38), (89.6, 1.36), (71.2, 1.94)),
        "fed_att": ((76.09, 6.31), (82.0, 2.76), (44.02, 1.02)),
        "fed_prox": ((81.94, 4.64), (89.4, 1.96), (69.4, 2.33)),
        "scaffold": ((82.0, 4.38), (90.0, 1.1), (70.8, 2.99)),
        "fed_per": ((81.71, 3.71), (88.95, 1.23), (69.98, 1.95)),
        "lg_fed_avg": ((80.33, 3.2), (87.03, 1.3), (69.26, 1.73)),
        "sfl": ((81.7, 4.7), (89.6, 0.8), (69.6, 1.62)),
        "sfl_star": ((81.25, 4.78), (89.2, 0.98), (68.4, 2.5)),
    },
}
TITLES = {
    "fed_avg": "FedAvg",
    "fed_att": "FedAtt",
    "fed_prox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fed_per": "FedPer",
    "lg_fed_avg": "LG-FedAvg",
    "sfl": "SFL",
    "sfl_star": "SFL*",
}


def image_table(number: int, title: str, shards: tuple[int, ...]) -> Table:
    return Table(
        number,
        title,
        ("method", "shards"),
        OF_CLIENTS,
        tuple(
            Row((TITLES[method], str(k)), "cifar10", method, values, {"shards": k})
            for k in shards
            for method, values in ON_IMAGES[k].items()
        ),
        "± is over clients, as in the paper.",
    )


PAPER = Paper(
    "SFL",
    DATASETS,
    (
        Table(
            1,
            "traffic forecasts at 60 minutes",
            ("method",),
            (MAE, MAPE, RMSE),
            tuple(
                Row((title,), dataset, method, values)
                for title, (method, by_dataset) in ON_TRAFFIC.items()
                for dataset, values in by_dataset.items()
            ),
            "Errors are in mph, of PEMS-D4 and PEMS-D8 in vehicles. The paper quotes "
            "STGCN and Graph WaveNet.",
        ),
        image_table(2, "severe skew of labels", (2, 5)),
        image_table(3, "mild skew of labels", (10, 20)),
        Table(
            4,
            "SFL with personal layers",
            ("method",),
            (ACCURACY, MAE),
            (
                Row(("SFL",), "cifar10", "sfl", (45.03, None), {"shards": 5}),
                Row(
                    ("SFL + LG-FedAvg",),
                    "cifar10",
                    "sfl_lg",
                    (46.32, None),
                    {"shards": 5},
                ),
                Row(
                    ("SFL + FedPer",),
                    "cifar10",
                    "sfl_per",
                    (45.93, None),
                    {"shards": 5},
                ),
                Row(("SFL",), "pems_bay", "sfl", (None, 6.47)),
                Row(("SFL + LG-FedAvg",), "pems_bay", "sfl_lg", (None, 4.95)),
                Row(("SFL + FedPer",), "pems_bay", "sfl_per", (None, 4.82)),
            ),
            "Images are in 5 shards. Table 1 of the paper has an MAE of 2.96 mph for "
            "SFL on PEMS-BAY.",
        ),
    ),
)
