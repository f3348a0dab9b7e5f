"""CNFGNN's formulas of what a training exchanges in all (Eqs. 6 to 10).

The ledger of a run counts arrays that cross (`core.communication`); these give the
same for rounds in which every sensor takes part.
"""


def split_learning_total(
    num_rounds: int,
    num_nodes: int,
    hidden_bytes: int,
    model_bytes: int = 0,
    server_rounds: int = 1,
) -> int:
    """Computes the total bytes of CNFGNN's strategies, both directions (Eqs. 7 to 10).

    R (2 n W + (2 + 2 R_s) n H): a model crosses twice for FedAvg; h_c goes up once and
    h_G down once a round, h_G and its gradient once each a server round. Split
    learning is R_s = 1, and no FedAvg is W = 0.

    Args:
      num_rounds: R, global rounds.
      num_nodes: n.
      hidden_bytes: H, a node's hidden states over all training sequences.
      model_bytes: W, a client's model.
      server_rounds: R_s.
    """
    exchanges = 2 * model_bytes + (2 + 2 * server_rounds) * hidden_bytes
    return num_rounds * num_nodes * exchanges


def multi_task_total(num_rounds: int, num_edges: int, model_bytes: int) -> int:
    """Computes the total bytes of GRU + FMTL: R E W, E without self edges (Eq. 6)."""
    return num_rounds * num_edges * model_bytes
