"""Sparse features of nodes, such as bags of words, which a first layer multiplies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse


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

    def __mul__(self, factors: jax.Array) -> "SparseRows":
        """Each column of ONE matrix times one of the factors [F]."""
        values = self.values * factors[self.columns]
        return dataclasses.replace(self, values=values)

    def __matmul__(self, kernel: jax.Array) -> jax.Array:
        """The product of ONE matrix with a kernel [F, H]: [N, H]."""
        return _product(self, kernel)


def stack(matrices: list[scipy.sparse.csr_array], num_rows: int) -> SparseRows:
    """Puts K matrices [n, F] one behind another, padded to `num_rows`, on the host.

    Args:
      matrices: of the same number of columns.
      num_rows: N, as many as the largest has or more.
    """
    num_columns = matrices[0].shape[1]
    size = max(1, *(matrix.nnz for matrix in matrices))
    fields: list[list[np.ndarray]] = [[], [], [], []]
    for matrix in matrices:
        entries = scipy.sparse.coo_array(matrix)
        order = np.argsort(entries.coords[0], kind="stable")
        rows, columns = (ends[order] for ends in entries.coords)
        extra = (0, size - len(rows))
        columns = np.pad(columns, extra, constant_values=num_columns - 1)
        own = (
            np.pad(entries.data[order], extra),
            np.pad(rows, extra, constant_values=num_rows - 1),
            columns,
            np.argsort(columns, kind="stable"),
        )
        for field, values in zip(fields, own, strict=True):
            field.append(values)
    values, rows, columns, by_column = map(np.stack, fields)
    return SparseRows(
        values=values.astype(np.float32),
        rows=rows.astype(np.int32),
        columns=columns.astype(np.int32),
        by_column=by_column.astype(np.int32),
        num_rows=num_rows,
        num_columns=num_columns,
    )


@jax.custom_vjp
def _product(x: SparseRows, kernel: jax.Array) -> jax.Array:
    return _sums(x.values, kernel[x.columns], x.rows, x.num_rows)


def _sums(values, rows, places, size):
    weighted = values[:, None] * rows
    return jax.ops.segment_sum(weighted, places, size, indices_are_sorted=True)


def _forward(x, kernel):
    return _product(x, kernel), (x, kernel)


def _backward(kept, gradient):
    x, kernel = kept
    order = x.by_column
    of_kernel = _sums(
        x.values[order], gradient[x.rows[order]], x.columns[order], x.num_columns
    )
    of_values = jnp.sum(gradient[x.rows] * kernel[x.columns], axis=1)
    return dataclasses.replace(x, values=of_values, **_NO_GRADIENT), of_kernel


_NO_GRADIENT = {"rows": None, "columns": None, "by_column": None}
_product.defvjp(_forward, _backward)
