"""What of OpenFGL is changed so that it runs at all, or in time (`openfgl_runs.py`)."""

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch.nn import functional


def without_torch_scatter() -> None:
    """FED-PUB and FGSSL import packages that need a compiler; one sum is called."""
    scatter, sparse = types.ModuleType("torch_scatter"), mock.MagicMock()

    def scatter_add(x, index, dim, dim_size):
        return torch.zeros(dim_size, dtype=x.dtype).scatter_add(dim, index, x)

    scatter.scatter_add, scatter.scatter = scatter_add, None
    sparse.SparseTensor = type("SparseTensor", (), {})
    sys.modules |= {"torch_scatter": scatter, "torch_sparse": sparse}


def with_scipys_product() -> None:
    """AdaFGL loads a C library from a path of its authors' machine."""
    from openfgl.flcore.adafgl import op

    op.csr_sparse_dense_matmul = lambda adjacency, x: adjacency @ x


def with_unlabelled_nodes() -> None:
    """AdaFGL fails where a label is missing, -1; such nodes begin as those to guess."""
    from openfgl.flcore.adafgl import label_propagation_models

    def one_hot(labels, num_classes):
        of_known = functional.one_hot(labels.clamp(min=0), num_classes).float()
        return torch.where(labels[:, None] < 0, 1 / num_classes, of_known)

    label_propagation_models.F = types.SimpleNamespace(one_hot=one_hot)


def with_network(make: Callable[[], torch.nn.Module]) -> None:
    """GCFL+'s own network pools whole graphs, so its clients train another."""
    from openfgl.flcore.gcfl_plus import client, server

    client.GIN = server.CrossDomainGIN = lambda **sizes: make()


def with_sparse_features(width: int) -> AbstractContextManager:
    """Has features of this width, most of them zero, multiplied as sparse arrays.

    The sums are the same to rounding, in a fraction of the time: for accuracies on wide
    features alone, never for OpenFGL's own seconds.
    """
    dense, kept = functional.linear, {}

    def linear(x, weight, bias=None):
        if x.requires_grad or x.shape[-1] != width:
            return dense(x, weight, bias)
        if id(x) not in kept:  # `x` is kept too, so that its id stays its own
            kept[id(x)] = x, x.to_sparse_csr(), x.T.contiguous().to_sparse_csr()
        product = SparseProduct.apply(weight, *kept[id(x)][1:])
        return product if bias is None else product + bias

    return mock.patch.object(functional, "linear", linear)


class SparseProduct(torch.autograd.Function):
    """x Wᵀ of a sparse x, [N, F], and of W, [H, F], whose gradient is gᵀ x."""

    @staticmethod
    def forward(context, weight, x, transposed):
        context.transposed = transposed
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        return (context.transposed @ gradient).T, None, None
