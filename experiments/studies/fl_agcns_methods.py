"""What FL-AGCNS's study runs: searches, fixed networks and given codes."""

from experiments.studies.base import titles_of

EVOLUTIONARY = ("fl_agcns", "controller_eo", "client_eo")
SEARCHES = (*EVOLUTIONARY, "fl_random", "fl_rl", "fl_gradient")
FIXED = {
    "gat": "GAT",
    "sage": "SAGE",
    "gcn": "GCN",
    "sgc": "SGC",
    "appnp": "APPNP",
    "agnn": "AGNN",
    "arma": "ARMA",
    "gated_graph": "GatedGraph",
}
VARIANTS = {
    "gat_one_head": "GAT, one head",
    "sage_relu": "SAGE, ReLU",
    "agnn_two_layers": "AGNN, two layers",
    "arma_one_stack": "ARMA, one stack",
}
NETWORKS = FIXED | VARIANTS
METHODS = (*SEARCHES, *NETWORKS, "code")


def titles() -> dict[str, str]:
    """Titles of the study's methods: a fixed network's is that of its model."""
    named = titles_of(METHODS, NETWORKS | {"code": "given code"})
    return {method: named[method] for method in METHODS}
