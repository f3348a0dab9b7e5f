"""Public dataset files: where they lie, what digest they have, how they get here.

Downloads go to a cache folder: pooch's for `fedjax_graph`, or FEDJAX_GRAPH_CACHE.
A file enters it whole and checked or not at all, and none is ever written over.
"""

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pooch

from fedjax_graph.core.errors import InputError

_DCRNN = "https://raw.githubusercontent.com/liyaguang/DCRNN/master/data/sensor_graph/"
_DL_TRAFF = "https://raw.githubusercontent.com/deepkashiwa20/DL-Traff-Graph/main/"
_ASTGCN = "https://github.com/wanhuaiyu/ASTGCN/raw/master/data/"
_ASTGNN = "https://raw.githubusercontent.com/guoshnBJTU/ASTGNN/main/data/"
_PLANETOID = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data/"
_GNN_BENCHMARK = "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/"
_CSV = "https://raw.githubusercontent.com/radandreicristian/traffic-datasets/master/"


class Source(NamedTuple):
    """One public file."""

    filename: str  # its name in the cache
    urls: tuple[str, ...]  # mirrors, tried in order
    git_blob: str | None = None  # as `git hash-object FILE` prints it
    sha256: str | None = None
    member: str | None = None  # `filename` is this member of a zip archive at `urls`


def _planetoid(name: str, **git_blobs: str) -> tuple[tuple[Source, ...], ...]:
    """Files of a dataset of Planetoid; `test_index` stands for the part test.index."""
    filenames = {f"ind.{name}.{p.replace('_', '.')}": b for p, b in git_blobs.items()}
    return tuple(
        (Source(filename, (f"{_PLANETOID}{filename}",), git_blob),)
        for filename, git_blob in filenames.items()
    )


def _astgnn(number: str, **git_blobs: str) -> tuple[tuple[Source, ...], ...]:
    """Files of PEMSD3 and PEMSD7 by their suffixes."""
    filenames = {f"PEMS{number}.{suffix}": b for suffix, b in git_blobs.items()}
    return tuple(
        (Source(filename, (f"{_ASTGNN}PEMS{number}/{filename}",), git_blob),)
        for filename, git_blob in filenames.items()
    )


def _gnn_benchmark(filename: str, git_blob: str) -> tuple[tuple[Source, ...], ...]:
    return ((Source(filename, (f"{_GNN_BENCHMARK}{filename}",), git_blob),),)


# Dataset -> the files it needs; each as alternatives, the first to be had is taken.
REGISTRY: dict[str, tuple[tuple[Source, ...], ...]] = {
    "metr_la": (
        (
            Source(
                "metr-la.h5",
                (f"{_DL_TRAFF}METRLA/metr-la.h5",),
                "7df0003054d1bccd255d38949b2ef011dcadad3f",
            ),
            Source(
                "metr-la.csv",
                (f"{_CSV}METR-LA/sensor-readings.csv",),
                "3fb6a0f9ed677dbe71fca4f40e9f0c0e106a947d",
                "5fa498de0c90f5ff9b67e7cf9654bec031a803b320a8eb13d48021b9983bec82",
            ),
        ),
        (
            Source(
                "adj_mx.pkl",
                (f"{_DCRNN}adj_mx.pkl", f"{_DL_TRAFF}METRLA/adj_mx.pkl"),
                "a15a5904a83e7f13fe94d32fcd45c00f163ffd97",
                "a35687c6e15aa228dc45027b0ed2a0ea0f4ec78f573deb992c595092d12f61b3",
            ),
            Source(
                "distances_la_2012.csv",
                (
                    f"{_DCRNN}distances_la_2012.csv",
                    f"{_DL_TRAFF}METRLA/distances_la_2012.csv",
                ),
                "759d2bc751c89b91fd63dc1fc8ceba904a85b1c2",
            ),
        ),
        (
            Source(
                "graph_sensor_locations.csv",
                (
                    f"{_DCRNN}graph_sensor_locations.csv",
                    f"{_DL_TRAFF}METRLA/graph_sensor_locations.csv",
                ),
                "d0bb95872860d274678d2dff4ab52ce51f74b706",
            ),
        ),
    ),
    "pems_bay": (
        (
            Source(
                "pems-bay.h5",
                (f"{_DL_TRAFF}PEMSBAY/pems-bay.zip",),
                "78618384cc8d7e0e0d99fc15b021dad8cbbf4da2",
                member="pems-bay.h5",
            ),
            Source(
                "pems-bay.csv",
                (f"{_CSV}PeMS-Bay/sensor-readings.csv",),
                "3612ff649b47e939c93f31ea9f3dfbe265b76f68",
            ),
        ),
        (
            Source(
                "adj_mx_bay.pkl",
                (f"{_DCRNN}adj_mx_bay.pkl", f"{_DL_TRAFF}PEMSBAY/adj_mx_bay.pkl"),
                "6651951a08ab101c818b1f27ba9a908d3ad56539",
                "116275f5704d0d492018e14c047f7ae5004385b450aa907f88424055a4a97370",
            ),
            Source(
                "distances_bay_2017.csv",
                (f"{_DCRNN}distances_bay_2017.csv", f"{_CSV}PeMS-Bay/distances.csv"),
                "7ab39dbef8e7722c733f8cfdfbf3d1d3baef305b",
                "e5feed06bfa1ba4c554a946d0e03d99f2018365eec5a8f28fd8504dea9d082b5",
            ),
        ),
        (
            Source(
                "graph_sensor_locations_bay.csv",
                (f"{_DCRNN}graph_sensor_locations_bay.csv",),
                "b3e2471001f719e805ed4bae8d5d5e6262a1006a",
            ),
        ),
    ),
    "pems_d3": _astgnn(
        "03",
        npz="b4487154fc9611a3bf9856b0aad34efa610ea8ae",
        csv="00dec00c904e85045f41fd5325eccbbbdf30e70d",
        txt="4d5aacb57797d3d701a890e7a91d2f7458646531",
    ),
    "pems_d4": (
        (
            Source(
                "pems04.npz",
                (f"{_ASTGCN}PEMS04/pems04.npz",),
                "a1a39eac4b86963b1ac22874fd1cc693eb642cd2",
            ),
        ),
        (
            Source(
                "PEMS04.distance.csv",
                (f"{_ASTGCN}PEMS04/distance.csv",),
                "2569623e29fa9685ae230246a20f31741ee6cf01",
                "68ffaa80447eb34428a9999dc28363c61406ec0fd714686d0582d2386ac6f5f7",
            ),
        ),
    ),
    "pems_d7": _astgnn(
        "07",
        npz="28c547f80eb8804d3e378168c80f77f82db2680a",
        csv="0a5a3bb0b5a1510fbe424fe7887f31ea2e178fbc",
    ),
    "pems_d8": (
        (
            Source(
                "pems08.npz",
                (f"{_ASTGCN}PEMS08/pems08.npz",),
                "f5f3e84a00417573aa8487fe1e9e8cd13c6026c8",
            ),
        ),
        (
            Source(
                "PEMS08.distance.csv",
                (f"{_ASTGCN}PEMS08/distance.csv",),
                "cf11bea3ff4229d2d900fdcf1085828d25429c88",
                "859d68e7583ed4e6016588eaaca494d3ece286dae361614c5c1833017f87eaa7",
            ),
        ),
    ),
    "cifar10": (
        (
            Source(
                "cifar-10-python.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                sha256="6d958be074577803d12ecdefd02955f3"
                "9262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
    ),
    "cora": _planetoid(
        "cora",
        allx="44d53b1fece343538e45592caac521d73c6f98d6",
        ally="04fbd0b083d09341fcf16b395c642329637f0542",
        tx="6e856d777401ee15dc8619db76c97d0a40ba2d60",
        ty="da1734ab670b5c8ecee78a9c30b35566df916f4b",
        y="58e30ef120d3553cfaac33ff28c6b5436dbef661",
        graph="4d3bf85dfc8b1c105a2c995597a1b3eed6947925",
        test_index="ded8092db4cd767a367eebe09003b954a5316f24",
    ),
    "citeseer": _planetoid(
        "citeseer",
        allx="592091071ac35b78599c722d0e60b1c655711728",
        ally="7503f81a0b6ac1cc21cb5a97073542a6b1dfe99c",
        tx="b2aff18aa1fc6f4f5e8c64db7643b59b24e42584",
        ty="3795f79df0cd1123f4478b77c148a5fbacc4cefb",
        y="e857ac49b611da98e101a068cf4855350274f68a",
        graph="a01dca663d0103c130f525017a4a9c313037e286",
        test_index="62d9e3d5ed53c66b069125af98529d76c70d9b3e",
    ),
    "pubmed": _planetoid(
        "pubmed",
        allx="3b86bccf08111c37c632a9dd8ab63db25ea76361",
        ally="4c8bcdc80882dd225fe4dd4fafd723baa616ac97",
        tx="eee4f3c988fde0da87a9ec7b01ca5e7863c1b1f1",
        ty="225a0bb9bb6430e3925d04688daf6a0da964c07a",
        y="e86670576c85340eeb2271b3c918bfa89322b2cf",
        graph="76eb87e628a6b9d43fc31ea42c8c6c8f3e52b404",
        test_index="41f6befcb7750cc4858cb852f2b349a9598cb2f4",
    ),
    "cora_full": _gnn_benchmark(
        "cora_full.npz", "2478a176d63fe71090f4c21fe588bf5d381cad80"
    ),
    "coauthor_cs": _gnn_benchmark(
        "ms_academic_cs.npz", "9bdd7da943d86b74297e8d32e99eb64245b52835"
    ),
    "coauthor_physics": _gnn_benchmark(
        "ms_academic_phy.npz", "8d8bc12e29aa67f6753a712080eae81079bd7d01"
    ),
    "amazon_photo": _gnn_benchmark(
        "amazon_electronics_photo.npz", "97323743cb56aca9dd611f5b4b46862c1c9c6bd9"
    ),
    "amazon_computers": _gnn_benchmark(
        "amazon_electronics_computers.npz", "8120e4148a330b3fafe37c4476823302d9d834b9"
    ),
}


def cache_folder() -> Path:
    """Where downloads are kept: $FEDJAX_GRAPH_CACHE, or the system's cache folder."""
    return Path(os.environ.get("FEDJAX_GRAPH_CACHE") or pooch.os_cache("fedjax_graph"))


def fetch(name: str) -> list[Path]:
    """Makes sure that the files of a dataset are in the cache.

    Args:
      name: a dataset of `REGISTRY`.

    Returns:
      Paths of the files in the cache, downloaded now or before.

    Raises:
      InputError: if the dataset has no public place, no place gave the right file, or
        the cache holds a file of that name with another digest (it is left alone).
    """
    if name not in REGISTRY:
        raise InputError(
            f"{name}: not known as a public download; those known: "
            + ", ".join(sorted(REGISTRY))
        )
    return [_fetch_any(alternatives) for alternatives in REGISTRY[name]]


def digests(name: str) -> dict[str, Source]:
    """The files of a dataset whose digest is known, by file name.

    Files of an archive have none of their own.
    """
    sources = (x for files in REGISTRY.get(name, ()) for x in files)
    return {x.filename: x for x in sources if x.member is None}


def difference(path: Path, source: Source) -> str | None:
    """What of a file's digests is not as published; None where they are right."""
    try:
        _check_digests(path, source)
    except ValueError as error:
        return str(error)
    return None


def git_blob_id(path: str | os.PathLike) -> str:
    """SHA-1 of a file as git counts it: what `git hash-object FILE` prints."""
    digest = hashlib.sha1(b"blob %d\0" % os.path.getsize(path))
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch_any(alternatives: tuple[Source, ...]) -> Path:
    cache = cache_folder()
    for source in alternatives:
        path = cache / source.filename
        if path.exists():
            _check_present(path, source)
            return path
    failures = []
    for source in alternatives:
        for url in source.urls:
            try:
                return _download(url, source, cache)
            except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
                failures.append(f"{url} ({_reason(error)})")
    raise InputError(
        f"{alternatives[0].filename}: not downloaded from {', '.join(failures)}; get "
        f"it by hand and put it into {cache}"
    )


def _check_present(path: Path, source: Source) -> None:
    """Checks a file that was there before; a member of an archive has no digest."""
    reason = None if source.member else difference(path, source)
    if reason:
        raise InputError(
            f"{path}: not the published file ({reason}); move it away to download it"
        )


def _check_digests(path: Path, source: Source) -> None:
    if source.sha256 is not None:
        found = pooch.file_hash(str(path), alg="sha256")
        if found != source.sha256:
            raise ValueError(f"sha256 {found}, expected {source.sha256}")
    if source.git_blob is not None:
        found = git_blob_id(path)
        if found != source.git_blob:
            raise ValueError(f"git blob id {found}, expected {source.git_blob}")


def _download(url: str, source: Source, cache: Path) -> Path:
    """Brings one file into the cache, by way of a folder that vanishes on failure."""
    pooch.get_logger().setLevel("WARNING")
    progress = sys.stderr.isatty()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        arrived = Path(
            pooch.retrieve(
                url,
                known_hash=source.sha256 and f"sha256:{source.sha256}",
                fname="arrived",
                path=folder,
                downloader=pooch.HTTPDownloader(progressbar=progress, timeout=60),
            )
        )
        _check_digests(arrived, source)
        if source.member is not None:
            arrived = _extract(arrived, source.member, Path(folder))
        return arrived.rename(cache / source.filename)


def _extract(archive: Path, member: str, folder: Path) -> Path:
    """Takes the member of that file name out of a zip archive, wherever it lies."""
    with zipfile.ZipFile(archive) as content:
        names = [info for info in content.namelist() if Path(info).name == member]
        if len(names) != 1:
            raise LookupError(f"archive without one {member}")
        return Path(content.extract(names[0], folder / "extracted"))


def _reason(error: Exception) -> str:
    """Why a download failed, without the retries and objects that requests lists."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    if isinstance(error, OSError) and error.errno is None:
        return type(error).__name__
    return " ".join(str(error).split()).split(". ")[0]  # pooch writes three sentences
