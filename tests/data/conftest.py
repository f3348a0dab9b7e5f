"""Small real files, and a cache folder of its own for every test."""

from pathlib import Path

import pytest


@pytest.fixture
def original(data_dir) -> Path:
    """Small real files in the formats in which users have them."""
    folder = data_dir / "original"
    if not folder.is_dir():
        pytest.skip("real data: FEDJAX_GRAPH_DATA has no folder `original`")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty download cache, and no data folder from the environment."""
    monkeypatch.setenv("FEDJAX_GRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDJAX_GRAPH_DATA", raising=False)
    return tmp_path / "cache"
