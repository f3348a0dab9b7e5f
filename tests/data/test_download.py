import contextlib
import functools
import hashlib
import http.server
import threading
import zipfile

import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import download
from fedjax_graph.data.download import Source
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs.formats import PLANETOID_PARTS

CONTENT = b"from,to,cost\n1,2,3.5\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, *args):
        self.server.requested.append(self.path)

    def log_error(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server on this machine; `requested` has what was asked for, `folder` is it."""
    folder = tmp_path / "public"
    folder.mkdir()
    handler = functools.partial(_Handler, directory=folder)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with contextlib.closing(_serve(handler)) as running:
        running.folder, running.requested = folder, []
        running.url = f"http://127.0.0.1:{running.server_port}"
        yield running


def _serve(handler):
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.close = lambda: (server.shutdown(), thread.join(), server.server_close())
    return server


@pytest.fixture
def register(monkeypatch):
    def add(*sources):
        monkeypatch.setitem(download.REGISTRY, "toy", (sources,))

    return add


def _fails(match):
    with pytest.raises(InputError, match=match) as raised:
        download.fetch("toy")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_git_blob_id_is_what_git_prints(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"test content\n")
    # the example of the Git book, section "Git Objects"
    assert download.git_blob_id(path) == "d670460b4b4aece5915caf5c68d12f560a9fe3e4"


@pytest.mark.parametrize("digests", ["sha256", "git_blob", "both", "neither"])
def test_a_file_arrives_whole_and_is_fetched_once(cache, server, register, digests):
    (server.folder / "d.csv").write_bytes(CONTENT)
    blob = _git_hash(server.folder / "d.csv")
    sha256 = SHA256 if digests in ("sha256", "both") else None
    blob = blob if digests in ("git_blob", "both") else None
    register(Source("distances.csv", (f"{server.url}/d.csv",), blob, sha256))
    for _ in range(2):
        (path,) = download.fetch("toy")
        assert path == cache / "distances.csv"
        assert path.read_bytes() == CONTENT
    assert server.requested.count("/d.csv") == 1
    assert [path.name for path in cache.iterdir()] == ["distances.csv"]


def _git_hash(path):
    return hashlib.sha1(b"blob 21\0" + path.read_bytes()).hexdigest()


@pytest.mark.parametrize("digest", [{"sha256": "0" * 64}, {"git_blob": "0" * 40}])
def test_a_file_with_another_digest_is_not_kept(cache, server, register, digest):
    (server.folder / "d.csv").write_bytes(CONTENT)
    url = f"{server.url}/d.csv"
    register(Source("distances.csv", (url,), **digest))
    message = _fails("expected (sha256:)?0000")
    assert url in message and str(cache) in message
    assert list(cache.iterdir()) == []


def test_the_next_mirror_is_asked(cache, server, register):
    (server.folder / "bad.csv").write_bytes(CONTENT[:-3])  # cut off on the way
    (server.folder / "good.csv").write_bytes(CONTENT)
    names = ("absent.csv", "bad.csv", "good.csv")
    urls = tuple(f"{server.url}/{name}" for name in names)
    register(Source("distances.csv", urls, sha256=SHA256))
    (path,) = download.fetch("toy")
    assert path.read_bytes() == CONTENT
    assert server.requested == [f"/{name}" for name in names]


def test_another_format_is_fetched_where_the_first_is_gone(cache, server, register):
    (server.folder / "d.csv").write_bytes(CONTENT)
    register(
        Source("graph.pkl", (f"{server.url}/graph.pkl",)),
        Source("distances.csv", (f"{server.url}/d.csv",), sha256=SHA256),
    )
    assert download.fetch("toy") == [cache / "distances.csv"]


def test_no_network_is_one_line_with_the_place_for_a_file(cache, server, register):
    url = f"{server.url}/d.csv"
    server.close()
    register(Source("distances.csv", (url,), sha256=SHA256))
    message = _fails("ConnectionError")
    assert url in message and f"put it into {cache}" in message
    assert list(cache.iterdir()) == []


def test_a_missing_page_is_named_with_its_status(cache, server, register):
    register(Source("distances.csv", (f"{server.url}/d.csv",), sha256=SHA256))
    assert "HTTP status 404" in _fails("d.csv")


def test_a_file_of_the_user_is_left_alone(cache, server, register):
    (server.folder / "d.csv").write_bytes(CONTENT)
    cache.mkdir()
    (cache / "distances.csv").write_text("mine")
    register(Source("distances.csv", (f"{server.url}/d.csv",), sha256=SHA256))
    assert str(cache / "distances.csv") in _fails("move it away")
    assert (cache / "distances.csv").read_text() == "mine"
    assert server.requested == []


def test_a_member_is_taken_out_of_a_checked_archive(cache, server, register):
    archive = server.folder / "toy.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("folder/toy.h5", CONTENT)
        content.writestr("folder/other.h5", b"")
    urls = (f"{server.url}/toy.zip",)
    blob = download.git_blob_id(archive)
    register(Source("toy.h5", urls, blob, member="toy.h5"))
    (path,) = download.fetch("toy")
    assert path == cache / "toy.h5"
    assert path.read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == ["toy.h5"]
    path.unlink()
    register(Source("absent.h5", urls, blob, member="absent.h5"))
    _fails("without one absent.h5")
    assert list(cache.iterdir()) == []


def test_a_dataset_without_public_place(cache):
    with pytest.raises(InputError, match="pems_bay_subset: .* known: .*metr_la"):
        download.fetch("pems_bay_subset")


@pytest.mark.parametrize("dataset", sorted(download.REGISTRY))
def test_the_registry_has_a_digest_for_every_file(dataset):
    for alternatives in download.REGISTRY[dataset]:
        for source in alternatives:
            assert source.sha256 or source.git_blob
            assert all(url.startswith("https://") for url in source.urls)


@pytest.mark.parametrize("name", sorted(citation.PUBLISHED.keys() - {"amazon2m"}))
def test_what_is_fetched_of_a_graph_is_what_is_read(name):
    published = citation.PUBLISHED[name]
    filenames = {s.filename for files in download.REGISTRY[name] for s in files}
    if published.planetoid:
        assert filenames == {f"ind.{published.planetoid}.{p}" for p in PLANETOID_PARTS}
    else:
        assert filenames == {published.archives[-1]}


def test_no_two_files_have_one_name_in_the_cache():
    sources = [s for files in download.REGISTRY.values() for f in files for s in f]
    assert len({s.filename.lower() for s in sources}) == len(sources)


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        ("metr_la", ["adj_mx.pkl", "graph_sensor_locations.csv"]),
        ("pems_bay", ["adj_mx_bay.pkl", "distances_bay_2017.csv"]),
        ("pems_bay", ["graph_sensor_locations_bay.csv"]),
        ("pems_d4", ["PEMS04.distance.csv"]),
        ("pems_d8", ["PEMS08.distance.csv"]),
        ("cora", [f"ind.cora.{part}" for part in PLANETOID_PARTS]),
        ("citeseer", [f"ind.citeseer.{part}" for part in PLANETOID_PARTS]),
    ],
)
def test_the_registry_has_the_digests_of_the_real_files(dataset, names, original):
    sources = {s.filename: s for files in download.REGISTRY[dataset] for s in files}
    for name in names:
        (path,) = original.rglob(name)
        source = sources[name]
        assert download.git_blob_id(path) == source.git_blob
        if source.sha256:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == source.sha256
