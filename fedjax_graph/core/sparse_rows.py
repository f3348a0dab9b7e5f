"""Sparse features of nodes, such as bags of words, which a first layer multiplies."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse

from fedjax_graph.core import arrays, mesh
from fedjax_graph.core.graphs import segment_sum
from fedjax_graph.core.masked_rows import MaskedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseRows:
    """Holds the entries of a matrix [N, F] other than 0, or of several, [K, N, F].

    It has the shape and the type of a matrix, `x * factors` and `x @ kernel`, whose
    gradient in the kernel takes the entries column by column.
    """

    values: jax.Array  # [..., Z] float32, 0 for padding
    rows: jax.Array  # [..., Z] int32, ascending
    columns: jax.Array  # [..., Z] int32
    by_column: jax.Array  # [..., Z] int32, the order in which columns ascend
    row_starts: jax.Array  # [..., N + 1] int32, entries before each row, and all
    column_starts: jax.Array  # [..., F + 1] int32, likewise in that order
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_columns: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the dense array."""
        return (*self.values.shape[:-1], self.num_rows, self.num_columns)

    @property
    def dtype(self) -> Any:
        """That of the entries."""
        return self.values.dtype

    def __len__(self) -> int:
        """The length of the first axis."""
        return self.shape[0]

    @property
    def T(self) -> "SparseRows":  # noqa: N802, as arrays have it
        """The transpose of ONE matrix."""
        order = self.by_column
        places = jnp.arange(len(order), dtype=order.dtype)
        by_row = jnp.zeros_like(order).at[order].set(places)
        return SparseRows(
            values=self.values[order],
            rows=self.columns[order],
            columns=self.rows[order],
            by_column=by_row,
            row_starts=self.column_starts,
            column_starts=self.row_starts,
            num_rows=self.num_columns,
            num_columns=self.num_rows,
        )

    def __mul__(self, factors: jax.Array) -> "SparseRows":
        """Each column of ONE matrix times one of the factors [F]."""
        values = self.values * factors[self.columns]
        return dataclasses.replace(self, values=values)

    def __matmul__(self, kernel: jax.Array) -> jax.Array:
        """The product of ONE matrix with a kernel [F, H]: [N, H].

        Sums are taken in at least float32; gradients have their operands' types.
        """
        return _product(self, kernel)


def map_entries(
    fn: Callable[[jax.Array], jax.Array], x: jax.Array | SparseRows | MaskedRows
) -> Any:
    """Applies a function that leaves 0 as it is to all entries of a matrix.

    Args:
      fn: of an array, such as dropout.
      x: dense, masked, or sparse, of which `fn` gets the entries alone.
    """
    if isinstance(x, SparseRows):
        return dataclasses.replace(x, values=fn(x.values))
    if isinstance(x, MaskedRows):
        return dataclasses.replace(x, parts=(fn(x.dense()),))
    return fn(x)


def stack(matrices: list[scipy.sparse.csr_array], num_rows: int) -> SparseRows:
    """Puts K matrices [n, F] one behind another, padded to `num_rows`, on the host.

    Args:
      matrices: of the same number of columns.
      num_rows: N, as many as the largest has or more.
    """
    num_columns = matrices[0].shape[1]
    size = max(1, *(matrix.nnz for matrix in matrices))
    ends = np.arange(num_rows + 1), np.arange(num_columns + 1)
    fields = []
    for matrix in matrices:
        entries = scipy.sparse.coo_array(matrix)
        order = np.argsort(entries.coords[0], kind="stable")
        rows, columns = (x[order] for x in entries.coords)
        extra = (0, size - len(rows))
        rows = np.pad(rows, extra, constant_values=num_rows - 1)
        columns = np.pad(columns, extra, constant_values=num_columns - 1)
        by_column = np.argsort(columns, kind="stable")
        starts = map(np.searchsorted, (rows, columns[by_column]), ends)
        indices = (rows, columns, by_column, *starts)
        values = np.pad(entries.data[order], extra).astype(np.float32)
        fields.append((values, *(x.astype(np.int32) for x in indices)))
    parts = map(np.stack, zip(*fields, strict=True))
    return SparseRows(*parts, num_rows=num_rows, num_columns=num_columns)


@jax.custom_vjp
def _product(x: SparseRows, kernel: jax.Array) -> jax.Array:
    dtype = arrays.float_type(jnp.result_type(x.values, kernel))
    values, kernel = arrays.precise(x.values), arrays.precise(kernel)
    if mesh.backend() == "cpu":  # in a fraction of the time of XLA's scatter
        entries = (values, x.columns, x.row_starts)
        matrix = sparse.BCSR(entries, shape=(x.num_rows, x.num_columns))
        product = mesh.varying(matrix @ kernel)  # BCSR does not know what varies
    else:
        weighted = values[:, None] * kernel[x.columns]
        product = segment_sum(weighted, x.rows, x.num_rows, indices_are_sorted=True)
    return product.astype(dtype)


def _forward(x, kernel):
    return _product(x, kernel), (x, kernel)


def _backward(kept, gradient):
    x, kernel = kept
    gradient = arrays.precise(gradient)
    of_values = jnp.sum(gradient[x.rows] * kernel[x.columns], axis=1)
    of_values = _in_type_of(x.values, of_values)
    of_kernel = _in_type_of(kernel, x.T @ gradient)
    return dataclasses.replace(x, values=of_values, **_NO_GRADIENT), of_kernel


def _in_type_of(operand: jax.Array, gradient: jax.Array) -> jax.Array | None:
    """A gradient as JAX has it; None for whole numbers, which have none."""
    is_real = jnp.issubdtype(operand.dtype, jnp.floating)
    return gradient.astype(operand.dtype) if is_real else None


_NO_GRADIENT = dict.fromkeys(
    ("rows", "columns", "by_column", "row_starts", "column_starts")
)
_product.defvjp(_forward, _backward)
