"""What of OpenFGL has to be changed so that it runs at all (`openfgl_golden.py`)."""

import sys
import types
from collections.abc import Callable
from unittest import mock

import torch


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


def with_network(make: Callable[[], torch.nn.Module]) -> None:
    """GCFL+'s own network pools whole graphs, so its clients train another."""
    from openfgl.flcore.gcfl_plus import client, server

    client.GIN = server.CrossDomainGIN = lambda **sizes: make()
