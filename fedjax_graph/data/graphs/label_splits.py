"""Which labelled nodes each client learns from, and which judge what it learned.

Wang, Li, Li, Chen, "GraphFL: A Federated Learning Framework for Semi-Supervised Node
Classification on Graphs", ICDM 2022. `non_iid` deals few nodes of all classes to the
clients, `new_labels` holds classes out, to which a model has to adapt, and
`with_pseudo_labels` enlarges what clients have by what their models are sure of.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_graph.core import arrays, batching
from fedjax_graph.core.errors import InputError


class NodeSets(NamedTuple):
    """Holds labelled nodes of several tasks, a row each, padded by node 0, label 0."""

    nodes: np.ndarray  # [T, L] int32
    labels: np.ndarray  # [T, L] int32, as the task encodes them
    mask: np.ndarray  # [T, L] float32, 0 for padding


class Halves(NamedTuple):
    """Holds what a task learns from, and what it is judged by."""

    support: NodeSets  # [T, L_s]
    query: NodeSets  # [T, L_q]


Draw = dict[str, Halves]  # of each name in `batching.SPLITS`


# --- Few labels of all classes --------------------------------------------------------


def non_iid(
    labels: np.ndarray,
    *,
    num_classes: int,
    num_clients: int = 50,
    labels_per_class: int = 80,
    num_train: int | None = None,
    num_validation: int = 500,
    num_test: int = 1000,
    owners: np.ndarray | None = None,
    seed: int = 0,
) -> Draw:
    """Deals labelled nodes to clients, which get few and skewed labels each.

    With one seed, fewer training nodes are a subset of more. A client's first half,
    rounded up, is its support set; clients may be left without any node. Validation
    and test are one task each, [1, L], whose support set is empty.

    Args:
      labels: [N], negative for nodes that are in no set.
      num_classes: labels are below it.
      num_clients: K, the training tasks.
      labels_per_class: training nodes of each class, over all clients.
      num_train: training nodes of any class instead, as the released code draws them.
      num_validation: nodes of neither other split, fewer where not as many are left.
      num_test: nodes drawn from those that are not trained on.
      owners: [N], whose node each is; None deals the training nodes evenly.
      seed: of the draw.

    Raises:
      InputError: if there are too few nodes, or a label or an owner does not exist.
    """
    _check_least(
        1, num_clients=num_clients, num_validation=num_validation, num_test=num_test
    )
    _check_least(0, seed=seed)
    if num_clients > len(labels):
        raise InputError(
            f"num_clients = {num_clients}: expected 1 to {len(labels)}, a node for each"
        )
    usable = _usable(labels, num_classes)
    rng = np.random.default_rng(seed)
    train = _training_nodes(
        rng.permutation(usable), labels, num_classes, labels_per_class, num_train
    )
    others = rng.permutation(usable)  # a second order: the first one has fewest left
    others = others[~np.isin(others, train)]  # of small classes, at its end
    test, validation = np.split(others[: num_test + num_validation], [num_test])
    if not len(validation):
        raise InputError(
            f"num_test = {num_test}: {len(train)} training nodes leave {len(others)} "
            "labelled nodes, expected that many and one more to validate on; ask for "
            "fewer training or test nodes"
        )
    dealt = _deal(rng.permutation(train), num_clients, owners, len(labels))
    halves = [np.split(own, [(len(own) + 1) // 2]) for own in dealt]
    empty = train[:0]
    rows = {
        "train": tuple(zip(*halves, strict=True)),
        "validation": ([empty], [validation]),
        "test": ([empty], [test]),
    }
    return {
        split: Halves(
            *(_padded(nodes, [labels[own] for own in nodes]) for nodes in rows[split])
        )
        for split in batching.SPLITS
    }


def _training_nodes(
    order: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    labels_per_class: int,
    num_train: int | None,
) -> np.ndarray:
    """Takes the first nodes of an order, of each class or of any."""
    if num_train is None:
        _check_least(1, labels_per_class=labels_per_class)
        nodes_of = _by_class(order, labels, range(num_classes))
        _check_sizes(nodes_of, "labels_per_class", labels_per_class)
        return np.concatenate([own[:labels_per_class] for own in nodes_of.values()])
    _check_least(1, num_train=num_train)
    if num_train > len(order):
        raise InputError(
            f"num_train = {num_train}: there are only {len(order)} labelled nodes; ask "
            "for fewer"
        )
    return order[:num_train]


def _deal(
    nodes: np.ndarray, num_clients: int, owners: np.ndarray | None, num_nodes: int
) -> list[np.ndarray]:
    if owners is None:
        return np.array_split(nodes, num_clients)
    arrays.check_shape("owners", owners, (num_nodes,))
    if not np.issubdtype(np.asarray(owners).dtype, np.integer):
        raise InputError("owners: expected whole numbers")
    own = np.asarray(owners)[nodes]
    if own.min() < 0 or own.max() >= num_clients:
        raise InputError(
            f"owners has clients from {own.min()} to {own.max()}, expected 0 to "
            f"{num_clients - 1}; pass the owners of as many parts as clients"
        )
    return [nodes[own == client] for client in range(num_clients)]


# --- Classes that no client has trained on --------------------------------------------


def new_labels(
    labels: np.ndarray,
    *,
    num_classes: int,
    num_new_classes: int,
    num_clients: int = 50,
    nodes_per_class: int = 10,
    labels_per_class: int = 2,
    num_score: int = 20,
    seed: int = 0,
) -> Draw:
    """Draws a task of few classes for each client; those of the test are held out.

    The last K0 classes are held out. A task has K0 classes in a drawn order, encoded 0
    to K0 - 1, and as many nodes of each: to train, of K0 of the other classes; to
    test, of the held-out ones. Validation is like the test on classes of the training
    side, on nodes that no client trains on: those of its classes that still have
    enough of them.

    A client's task depends on its number, not on how many clients there are, and its
    training task not on what is asked for to validate and test. With one seed, test
    tasks of more labels have the same query sets, and the fewer labels in support.

    Args:
      labels: [N], negative for nodes that are in no set.
      num_classes: labels are below it.
      num_new_classes: K0.
      num_clients: K, the tasks of each split.
      nodes_per_class: of a training task; half of them, rounded up, for support.
      labels_per_class: for support in validation and test.
      num_score: nodes of each class for query in validation and test.
      seed: of the draw.

    Raises:
      InputError: if there are too few classes or nodes, or a label does not exist.
    """
    _check_least(
        1,
        num_clients=num_clients,
        num_new_classes=num_new_classes,
        labels_per_class=labels_per_class,
        num_score=num_score,
    )
    _check_least(2, nodes_per_class=nodes_per_class)
    _check_least(0, seed=seed)
    num_old = num_classes - num_new_classes
    if num_old < num_new_classes:
        raise InputError(
            f"num_new_classes = {num_new_classes}: expected at most half of the "
            f"{num_classes} classes, as training tasks have as many"
        )
    usable = _usable(labels, num_classes)
    old = _by_class(usable, labels, range(num_old))
    new = _by_class(usable, labels, range(num_old, num_classes))
    asked, number = "labels_per_class + num_score", labels_per_class + num_score
    _check_sizes(old, "nodes_per_class", nodes_per_class)
    _check_sizes(new, asked, number)

    def draw(split: str, nodes_of: Mapping[int, np.ndarray], *sizes: int) -> Halves:
        keys = [(batching.SPLITS.index(split), client) for client in range(num_clients)]
        return _tasks(nodes_of, num_new_classes, *sizes, seed=seed, keys=keys)

    num_query = nodes_per_class // 2
    train = draw("train", old, nodes_per_class - num_query, num_query)
    trained = np.concatenate([half.nodes.ravel() for half in train])
    left = {c: nodes[~np.isin(nodes, trained)] for c, nodes in old.items()}
    left = {c: nodes for c, nodes in left.items() if len(nodes) >= number}
    if len(left) < num_new_classes:
        raise InputError(
            f"{asked} = {number}: {len(left)} of the {num_old} training classes have "
            f"as many nodes left to validate on, expected {num_new_classes}; ask for "
            "fewer, or for fewer clients or nodes_per_class"
        )
    return {
        "train": train,
        "validation": draw("validation", left, labels_per_class, num_score),
        "test": draw("test", new, labels_per_class, num_score),
    }


def _tasks(
    nodes_of: Mapping[int, np.ndarray],
    num_classes: int,
    num_support: int,
    num_query: int,
    *,
    seed: int,
    keys: Iterable[tuple[int, ...]],
) -> Halves:
    """Draws a task of `num_classes` of the classes for each key of randomness."""
    picked = []
    for key in keys:
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
        classes = rng.permutation(list(nodes_of))[:num_classes]
        orders = [rng.permutation(nodes_of[c]) for c in classes]
        picked.append([order[: num_query + num_support] for order in orders])
    query, support = np.split(np.array(picked), [num_query], axis=2)
    return Halves(_encoded(support), _encoded(query))


def _encoded(nodes: np.ndarray) -> NodeSets:
    """Labels sets of nodes [T, classes, L] by their index on the middle axis."""
    labels = np.broadcast_to(np.arange(nodes.shape[1])[:, None], nodes.shape)
    return _padded(*(rows.reshape(len(nodes), -1) for rows in (nodes, labels)))


# --- Self-training --------------------------------------------------------------------


def with_pseudo_labels(
    draw: Draw,
    probabilities: np.ndarray,
    is_unlabelled: np.ndarray,
    num_per_class: int,
) -> tuple[Draw, NodeSets]:
    """Adds what each client's own model is surest of to its training sets.

    Of the nodes predicted to be of a class the most confident ones are taken, the lower
    number of equals first, in turn for support and for query. A client without training
    nodes adds none: nothing has trained its model.

    Args:
      draw: its training tasks have T clients.
      probabilities: [T, N, C] of each client's model.
      is_unlabelled: [T or 1, N] bool, nodes that a client may label; those that it
        trains on already are left out.
      num_per_class: most pseudo-labels of a class that a client adds.

    Returns:
      The draw with larger training sets, and the pseudo-labels alone [T, L].

    Raises:
      InputError: if the probabilities are not those of T clients, not finite or
        negative, or `is_unlabelled` is no mask.
    """
    probabilities = np.asarray(probabilities)
    num_tasks = len(draw["train"].support.nodes)
    arrays.check_shape("probabilities", probabilities, (num_tasks, None, None))
    arrays.check_weights("probabilities", probabilities)
    arrays.check_count("num_per_class", num_per_class, 0)
    if np.asarray(is_unlabelled).dtype != bool:
        raise InputError("is_unlabelled: expected a mask, bool")
    pseudo, enlarged = [], ([], [])
    allowed = np.broadcast_to(is_unlabelled, probabilities.shape[:2])
    halves = [_rows(half) for half in draw["train"]]
    for own, own_probabilities, is_allowed in zip(
        zip(*halves, strict=True), probabilities, allowed, strict=True
    ):
        labelled = np.concatenate([nodes for nodes, _ in own])
        may_label = is_allowed & (len(labelled) > 0)
        candidates = np.setdiff1d(np.flatnonzero(may_label), labelled)
        nodes, labels, ranks = _surest(candidates, own_probabilities, num_per_class)
        pseudo.append((nodes, labels))
        for parity, (own_nodes, own_labels) in enumerate(own):
            chosen = ranks % 2 == parity
            enlarged[parity].append(
                (
                    np.append(own_nodes, nodes[chosen]),
                    np.append(own_labels, labels[chosen]),
                )
            )
    train = Halves(*(_padded(*zip(*rows, strict=True)) for rows in enlarged))
    return {**draw, "train": train}, _padded(*zip(*pseudo, strict=True))


def _surest(
    candidates: np.ndarray, probabilities: np.ndarray, num_per_class: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Picks nodes class by class, with their predicted classes and ranks in them."""
    predicted = probabilities[candidates].argmax(axis=1)
    confidence = probabilities[candidates].max(axis=1)
    order = np.lexsort((candidates, -confidence, predicted))
    predicted = predicted[order]
    ranks = np.arange(len(order)) - np.searchsorted(predicted, predicted)
    kept = ranks < num_per_class
    return candidates[order][kept], predicted[kept], ranks[kept]


def is_scored(draw: Draw, copies: np.ndarray) -> np.ndarray:
    """Marks rows [N] that are validated or tested on, or copies of such nodes.

    Args:
      draw: of N rows.
      copies: [N], the node that each row is a copy of.
    """
    scored = [draw[split].query for split in ("validation", "test")]
    rows = np.concatenate([sets.nodes[sets.mask > 0] for sets in scored])
    return np.isin(copies, copies[rows])


def precision(pseudo: NodeSets, labels: np.ndarray) -> float:
    """Computes the percentage of pseudo-labels that are right, nan where none counts.

    Args:
      pseudo: [T, L].
      labels: [N], negative for nodes that do not count.
    """
    true = labels[pseudo.nodes]
    counts = (pseudo.mask > 0) & (true >= 0)
    if not counts.any():
        return float("nan")
    return 100 * float(np.mean(pseudo.labels[counts] == true[counts]))


# --- Rows -----------------------------------------------------------------------------


def stack(draws: Sequence[Draw]) -> Draw:
    """Stacks draws of equally many tasks: sets [D, T, L] of a common size."""

    def stacked(*arrays: np.ndarray) -> np.ndarray:
        length = max(array.shape[1] for array in arrays)
        return np.stack([np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in arrays])

    return jax.tree.map(stacked, *draws)


def _padded(nodes: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> NodeSets:
    """Pads rows of unequal sizes to a common one."""
    sizes = np.array([len(row) for row in nodes])
    mask = np.arange(sizes.max()) < sizes[:, None]
    padded = []
    for rows in (nodes, labels):
        padded.append(np.zeros(mask.shape, np.int32))
        padded[-1][mask] = np.concatenate(rows)
    return NodeSets(padded[0], padded[1], mask.astype(np.float32))


def _rows(sets: NodeSets) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lists nodes and labels of each task without the padding."""
    return [
        (nodes[mask > 0], labels[mask > 0])
        for nodes, labels, mask in zip(*sets, strict=True)
    ]


def _by_class(
    nodes: np.ndarray, labels: np.ndarray, classes: Iterable[int]
) -> dict[int, np.ndarray]:
    """Groups nodes by class, in their order."""
    return {c: nodes[labels[nodes] == c] for c in classes}


# --- Checks ---------------------------------------------------------------------------


def _usable(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Finds the nodes that have a label, ascending."""
    arrays.check_shape("labels", labels, (None,))
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"labels has type {labels.dtype}, expected whole numbers")
    if labels.max(initial=-1) >= num_classes:
        raise InputError(
            f"labels has the label {labels.max()}, expected 0 to {num_classes - 1} for "
            f"{num_classes} classes"
        )
    return np.flatnonzero(labels >= 0)


def _check_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        arrays.check_count(name, number, least)


def _check_sizes(nodes_of: Mapping[int, np.ndarray], asked: str, number: int) -> None:
    """Checks that every class has as many nodes."""
    smallest = min(nodes_of, key=lambda c: len(nodes_of[c]))
    if len(nodes_of[smallest]) < number:
        raise InputError(
            f"{asked} = {number}: class {smallest} has only {len(nodes_of[smallest])} "
            "labelled nodes; ask for fewer"
        )
