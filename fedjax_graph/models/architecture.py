"""Architecture codes of FL-AGCNS: a graph network as a row of integers.

Wang et al., "FL-AGCNS: Federated Learning Framework for Automatic Graph Convolutional
Network Search", arXiv 2104.04141, Section 3.1. A code is [IS, c_1, ..., c_L, OS], an
int array [L + 2]:

- IS and OS, 1 to 5: the activation of the fully connected input and output stage.
- c_i, 0 to 12 i: c_i - 1 = 12 x predecessor + op, where the predecessor is a layer
  before i or 0, the input stage.

What 0 means is the space's:

- `paper`: layer i and all after it are absent, so codes of equal genes before their
  first 0 are one network. So have the paper's Table 1 and the public code of January
  2021.
- `2022`: layer i alone is left out, as in the public code of June 2022; a layer whose
  predecessor is absent reads the input stage.

The outputs of all layers (`all`, the paper's) or of those that no other reads
(`leaves`, of 2022) are averaged before the output stage; without layers it reads the
input stage.

`decode`, `canonical` and `random_codes` can be traced: a code is data, not program. The
others run on the host.
"""

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError
from fedjax_graph.models.convolutions import CONVOLUTIONS

NUM_LAYERS = 6
OPS = tuple(CONVOLUTIONS)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Sigmoid": jax.nn.sigmoid,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "Softmax": jax.nn.softmax,
    "Identity": lambda x: x,
}
Fusion = Literal["leaves", "all"]
Space = Literal["paper", "2022"]
FUSIONS: dict[Space, Fusion] = {"paper": "all", "2022": "leaves"}  # what each has
Stages = tuple[int, int]  # activations IS and OS that are given; 0: any
Ops = tuple[str, ...]  # some of OPS, in their order
ANY_STAGES = (0, 0)
INPUT = 0  # the index of the input stage in a diagram; layer i has index i


class Architecture(NamedTuple):
    """Holds what a code says, layer by layer."""

    input_stage: jax.Array  # [] int32, index into ACTIVATIONS
    is_present: jax.Array  # [L] bool
    op: jax.Array  # [L] int32, index into OPS; 0 for an absent layer
    source: jax.Array  # [L] int32, what a layer reads: 0 the input stage, i layer i
    is_leaf: jax.Array  # [L] bool, present and read by no other layer
    output_stage: jax.Array  # [] int32, index into ACTIVATIONS

    def is_fused(self, fusion: Fusion) -> jax.Array:
        """Marks the layers [L] whose outputs are averaged.

        Raises:
          InputError: if there is no such fusion.
        """
        if fusion not in ("leaves", "all"):
            raise InputError(f"unknown fusion {fusion!r}; known: leaves, all")
        return self.is_leaf if fusion == "leaves" else self.is_present


class Choices(NamedTuple):
    """Says what the codes of a search may have."""

    stages: Stages = ANY_STAGES  # those that all have
    ops: Ops = OPS  # of layers; a gene's number is the same whichever there are


ANYTHING = Choices()


class Diagram(NamedTuple):
    """Holds a code as a graph: the stages and the layers that are present."""

    labels: dict[int, str]  # by place: 0 the input stage, i layer i, L + 1 the output
    edges: list[tuple[int, int]]  # (from, to)


def largest_genes(num_layers: int, num_ops: int = len(OPS)) -> np.ndarray:
    """Returns the largest value of each gene, [L + 2]; stages begin at 1, others at 0.

    Any row of genes in their ranges is a valid code. With fewer ops it is how many
    genes there are, but for 0.
    """
    layers = [num_ops * i for i in range(1, num_layers + 1)]
    return np.array([len(ACTIVATIONS), *layers, len(ACTIVATIONS)])


def is_gene(num_layers: int, choices: Choices = ANYTHING) -> np.ndarray:
    """Marks the values [L + 2, 12 L + 1] that each gene of a code may have.

    Raises:
      InputError: if a given stage or op is none.
    """
    largest = largest_genes(num_layers)[:, None]
    smallest = np.ones_like(largest)
    smallest[1:-1] = 0
    values = np.arange(largest[1:-1].max() + 1)
    allowed = (smallest <= values) & (values <= largest)
    is_op = np.isin((values - 1) % len(OPS), op_indices(choices.ops))
    allowed[1:-1] &= (values == 0) | is_op
    for index, stage in zip((0, -1), check_stages(choices.stages), strict=True):
        if stage:
            allowed[index] = values == stage
    return allowed


def check_stages(stages: Stages) -> Stages:
    """Returns given stages if there are such activations.

    Raises:
      InputError: otherwise.
    """
    known = range(len(ACTIVATIONS) + 1)
    if len(stages) != 2 or any(stage not in known for stage in stages):
        raise InputError(
            f"stages {','.join(map(str, stages))}: expected the activations of the "
            f"input and the output stage, such as 3,5; known: 0 any, {_activations()}"
        )
    return stages


def check_ops(ops: Ops) -> Ops:
    """Returns ops if they are some of all, in their order.

    Raises:
      InputError: otherwise.
    """
    if not (ops and isinstance(ops, tuple) and in_order(ops) == ops):
        raise InputError(
            f"ops {ops!r}: expected a tuple of some of these, in this order: "
            f"{', '.join(OPS)}"
        )
    return ops


def in_order(ops: Collection[str]) -> Ops:
    """Returns those of all ops that are among some, in the order of all."""
    return tuple(op for op in OPS if op in ops)


def op_indices(ops: Ops) -> np.ndarray:
    """Finds where some of the ops are among all; errors as of `check_ops`."""
    return np.array([OPS.index(op) for op in check_ops(ops)])


def op_branches(ops: Ops) -> np.ndarray:
    """Numbers all ops [12] by their places among some: 1 for the first, 0 if absent."""
    branches = np.zeros(len(OPS), np.int32)
    branches[op_indices(ops)] = np.arange(1, len(ops) + 1)
    return branches


def space_size(num_layers: int = NUM_LAYERS) -> int:
    """Counts the codes that there are; 65,595,473,125 of six layers."""
    layers = largest_genes(num_layers)[1:-1].tolist()
    return len(ACTIVATIONS) ** 2 * math.prod(largest + 1 for largest in layers)


def decode(
    code: jax.Array, space: Space = "paper", namespace: Any = jnp
) -> Architecture:
    """Reads a code [L + 2] with the functions of `jax.numpy`, or of NumPy.

    Raises:
      InputError: if there is no such space.
    """
    xp = namespace
    genes = code[1:-1]
    is_present = genes > 0
    if check_space(space) == "paper":
        is_present = xp.cumprod(is_present) > 0
    predecessor, op = xp.divmod(xp.maximum(genes - 1, 0), len(OPS))
    can_be_read = xp.concatenate([xp.array([False]), is_present])
    source = xp.where(can_be_read[predecessor], predecessor, INPUT)
    source = xp.where(is_present, source, INPUT)
    indices = xp.arange(1, len(genes) + 1)
    is_read = xp.any(source == indices[:, None], axis=1)
    op = xp.where(is_present, op, 0)
    is_leaf = is_present & ~is_read
    return Architecture(code[0] - 1, is_present, op, source, is_leaf, code[-1] - 1)


def check_space(space: Space) -> Space:
    """Returns a space if there is one of this name.

    Raises:
      InputError: otherwise.
    """
    if space not in FUSIONS:
        raise InputError(f"unknown space {space!r}; known: {', '.join(FUSIONS)}")
    return space


def canonical(code: jax.Array, space: Space = "paper") -> jax.Array:
    """Writes a code as its network: equal networks get equal codes.

    Absent layers are 0, and every predecessor is present.
    """
    network = decode(code, space)
    genes = len(OPS) * network.source + network.op + 1
    return jnp.asarray(code).at[1:-1].set(jnp.where(network.is_present, genes, 0))


def decode_static(code: Sequence[int], space: Space = "paper") -> Architecture:
    """Decodes into NumPy arrays, also where a program is being traced."""
    return jax.tree.map(np.asarray, decode(np.asarray(code, np.int32), space, np))


def random_codes(
    key: jax.Array,
    num: int,
    num_layers: int = NUM_LAYERS,
    *,
    space: Space = "paper",
    absence: float | None = 0.2,
    num_certain: int = 2,
    choices: Choices = ANYTHING,
) -> jax.Array:
    """Draws valid codes, every gene that is not 0 uniformly from what it may be.

    In the paper's space, depths are uniform in 1 to L: gene i, if the first is 1, is 0
    with probability 1 / (L - i + 2), the first never.

    Args:
      key: of the draw.
      num: number of codes.
      num_layers: L.
      space: of the codes.
      absence: in the space 2022, probability that a layer is absent; None: what makes
        all codes equally likely if no layer is certain.
      num_certain: in the space 2022, how many first layers are never absent; the
        default is what that code starts from.
      choices: what they may have.

    Returns:
      [num, L + 2] int32.

    Raises:
      InputError: if a given stage or op is none, a number no count, or the absence no
        probability.
    """
    arrays.check_count("num", num, 0)
    arrays.check_count("num_layers", num_layers)
    arrays.check_count("num_certain", num_certain, 0)
    if absence is not None and not 0 <= absence <= 1:
        raise InputError(f"absence={absence}: expected a number from 0 to 1")
    value_key, absence_key = jax.random.split(key)
    num_genes = largest_genes(num_layers, len(choices.ops))
    shape = (num, num_layers + 2)
    values = jax.random.randint(value_key, shape, 1, num_genes + 1)
    values = values.at[:, 1:-1].set(_genes(values[:, 1:-1] - 1, choices.ops))
    if check_space(space) == "paper":
        rates, num_certain = 1 / (num_layers + 2 - np.arange(num_layers + 2)), 1
    elif absence is None:
        rates = 1 / (num_genes + 1)
    else:
        rates = np.full(num_layers + 2, absence)
    rates[: num_certain + 1] = rates[-1] = 0
    codes = jnp.where(jax.random.bernoulli(absence_key, rates, shape), 0, values)
    given = np.zeros(num_layers + 2, np.int32)
    given[[0, -1]] = check_stages(choices.stages)
    return jnp.where(given > 0, given, codes)


def _genes(numbers: jax.Array, ops: Ops) -> jax.Array:
    """Writes the genes that are not 0 of some ops, counted from 0, as genes."""
    predecessor, place = jnp.divmod(numbers, len(ops))
    return len(OPS) * predecessor + jnp.asarray(op_indices(ops))[place] + 1


def fair_codes(
    key: jax.Array,
    num: int,
    num_layers: int = NUM_LAYERS,
    *,
    space: Space = "paper",
    choices: Choices = ANYTHING,
) -> jax.Array:
    """Draws valid codes that use the sets of weights of a layer alike.

    In the paper's space depths are drawn as by `random_codes`, in that of 2022 all
    layers are present. Where layer i is, its genes, 12 i of all ops, take turns in a
    drawn order: each occurs as often as any other, up to one. This is after the strict
    fairness of Chu, Zhang, Xu, "FairNAS", ICCV 2021, who have each op once in a step.

    Args:
      key, num, num_layers, space, choices: see `random_codes`.

    Returns:
      [num, L + 2] int32.
    """
    code_key, *keys = jax.random.split(key, num_layers + 1)
    codes = random_codes(
        code_key, num, num_layers, space=space, num_certain=num_layers, choices=choices
    )
    is_present = jax.vmap(lambda code: decode(code, space).is_present)(codes)
    for layer, (key, present) in enumerate(zip(keys, is_present.T, strict=True), 1):
        size = len(choices.ops) * layer
        orders = jax.random.split(key, -(-num // size))
        genes = jax.vmap(lambda key, n=size: jax.random.permutation(key, n))(orders)
        turn = jnp.cumsum(present) - 1
        in_turn = _genes(genes.reshape(-1)[jnp.maximum(turn, 0)], choices.ops)
        codes = codes.at[:, layer].set(jnp.where(present, in_turn, 0))
    return codes


def _activations() -> str:
    """Names the activations of stages."""
    return ", ".join(f"{i} {name}" for i, name in enumerate(ACTIVATIONS, 1))


# --- Codes for people ----------------------------------------------------------------


def to_text(code: Sequence[int]) -> str:
    """Writes genes with commas between: "3,6,0,0,6,54,55,5"."""
    return ",".join(map(str, code))


def parse(text: str, num_layers: int | None = None) -> np.ndarray:
    """Reads what `to_text` writes, or the same in brackets, which is JSON.

    Args:
      text: the code.
      num_layers: see `check`.

    Returns:
      [L + 2] int32.

    Raises:
      InputError: if it is no valid code.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    try:
        genes = [int(gene) for gene in inner.split(",")]
    except ValueError:
        genes = []
    if not genes:
        raise InputError(
            f"architecture code {textwrap.shorten(text, 60)!r}: expected integers with "
            "commas between, such as 3,6,0,0,6,54,55,5"
        )
    return check(genes, num_layers)


def check(code: Sequence[int], num_layers: int | None = None) -> np.ndarray:
    """Returns a code as an int32 array [L + 2] if it is valid.

    Args:
      code: the genes.
      num_layers: L; None for any.

    Raises:
      InputError: if it is no row of integers, or has another number of them, or one is
        out of its range.
    """
    try:
        genes = np.asarray(code)
    except ValueError as error:
        raise InputError(
            "architecture code of rows of unequal length: expected a row of integers"
        ) from error
    if genes.ndim != 1 or not np.issubdtype(genes.dtype, np.integer):
        raise InputError(
            f"architecture code of shape {genes.shape} and type {genes.dtype}: "
            "expected a row of integers"
        )
    code = genes.tolist()
    name = f"architecture code {to_text(code)}"
    if len(code) < 3 or num_layers not in (None, len(code) - 2):
        wanted = "at least 3" if num_layers is None else num_layers + 2
        raise InputError(
            f"{name}: expected {wanted} genes, the input stage, the layers and the "
            f"output stage; got {len(code)}"
        )
    num_stages = len(ACTIVATIONS)
    for stage, gene in (("input", code[0]), ("output", code[-1])):
        if not 1 <= gene <= num_stages:
            raise InputError(
                f"{name}: {stage} stage {gene}; expected one of {_activations()}"
            )
    for layer, gene in enumerate(code[1:-1], 1):
        largest = len(OPS) * layer
        if not 0 <= gene <= largest:
            why = f", which reads layer {(gene - 1) // len(OPS)}" if gene > 0 else ""
            raise InputError(
                f"{name}: layer {layer} is {gene}{why}; expected 0 (absent) to "
                f"{largest}, as a layer reads one before it"
            )
    return genes.astype(np.int32)


def diagram(
    code: Sequence[int], fusion: Fusion = "all", space: Space = "paper"
) -> Diagram:
    """Draws up what a picture of a code shows.

    Raises:
      InputError: if the code is not valid, or there is no such fusion or space.
    """
    network = decode_static(check(code), space)
    activations = list(ACTIVATIONS)
    output = len(code) - 1
    layers = [int(i) + 1 for i in np.flatnonzero(network.is_present)]
    fused = [int(i) + 1 for i in np.flatnonzero(network.is_fused(fusion))]
    labels = {INPUT: f"input stage: {activations[network.input_stage]}"}
    labels |= {i: f"layer {i}: {OPS[network.op[i - 1]]}" for i in layers}
    labels |= {output: f"output stage: {activations[network.output_stage]}"}
    edges = [(int(network.source[i - 1]), i) for i in layers]
    return Diagram(labels, edges + [(i, output) for i in fused or [INPUT]])


def describe(
    code: Sequence[int], fusion: Fusion = "all", space: Space = "paper"
) -> str:
    """Describes a code in words, one line for each stage and layer.

    Raises:
      InputError: if the code is not valid, or there is no such fusion or space.
    """
    labels, edges = diagram(code, fusion, space)
    output = len(code) - 1

    def name(index):
        return f"layer {index}" if index else "the input stage"

    def line(index):
        if index not in labels:
            return f"layer {index}: absent"
        if index == INPUT:
            return f"{labels[index]} of a fully connected layer"
        read = [name(source) for source, receiver in edges if receiver == index]
        if index != output:
            is_fused = (index, output) in edges
            return f"{labels[index]} of {read[0]}{', fused' if is_fused else ''}"
        kind = "the mean of " if len(read) > 1 else ""
        return f"{labels[index]} of a fully connected layer of {kind}{', '.join(read)}"

    return "\n".join(line(index) for index in range(output + 1))
