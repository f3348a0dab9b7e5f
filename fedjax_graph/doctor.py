"""Looks at an installation: what is there, what is broken, and what to do about it.

python -m fedjax_graph.doctor
python -m fedjax_graph.doctor --data_dir=FOLDER

A line for each thing that was looked at, and below a problem what to do. The status is
0 where there is none, 1 otherwise.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import NamedTuple

from packaging import requirements
from packaging.version import Version

import fedjax_graph
from fedjax_graph.core import exits
from fedjax_graph.core.errors import InputError, one_line

NAME = "fedjax-graph"
FREE_GIB = 2  # of disk for programs, downloads and a run
# Versions that do not work together, though each is allowed: (package, from), (package,
# below), and what happens.
BROKEN_PAIRS = ((("jax", "0.11.1"), ("flax", "0.12.10"), "flax does not import"),)
SAME_VERSIONS = (  # packages of JAX that have to have the version of another
    ("jax-cuda13-plugin", "jaxlib"),
    ("jax-cuda13-pjrt", "jaxlib"),
    ("jax-cuda12-plugin", "jaxlib"),
    ("jax-cuda12-pjrt", "jaxlib"),
)


class Finding(NamedTuple):
    """What was looked at, how it is, and what to do where it is a problem."""

    subject: str
    said: str
    remedy: str | None = None

    def text(self) -> str:
        """A line, and a second one of a problem."""
        if self.remedy is None:
            return f"ok       {self.subject}: {self.said}"
        return f"problem  {self.subject}: {self.said}\n         -> {self.remedy}"


Findings = Iterator[Finding]


def installed(name: str) -> Version | None:
    """The version of a package, or None where it is not installed."""
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


# --- Versions ------------------------------------------------------------------------


def check_versions() -> Findings:
    """Python, this package, what it needs, and pairs that are known to be broken."""
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    try:
        needed = [requirements.Requirement(x) for x in metadata.requires(NAME) or ()]
    except metadata.PackageNotFoundError:
        yield Finding(
            "fedjax_graph",
            f"{fedjax_graph.__version__} in {_home()}, not installed",
            "run `pip install -e .` in its folder",
        )
        return
    yield Finding("fedjax_graph", f"{fedjax_graph.__version__} in {_home()}")
    for requirement in needed:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield _required(requirement)
    yield from _pairs()


def _home() -> pathlib.Path:
    return pathlib.Path(fedjax_graph.__file__).parent


def _required(requirement: requirements.Requirement) -> Finding:
    name, version = requirement.name, installed(requirement.name)
    remedy = f"run `pip install '{name}{requirement.specifier}'`"
    if version is None:
        return Finding(name, "not installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(name, f"{version}, expected {requirement.specifier}", remedy)
    return Finding(name, str(version))


def _pairs() -> Findings:
    for (newer, least), (older, below), what in BROKEN_PAIRS:
        one, other = installed(newer), installed(older)
        if one is None or other is None:
            continue
        if one >= Version(least) and other < Version(below):
            yield Finding(
                f"{newer} {one} with {older} {other}",
                what,
                f"run `pip install -U '{older}>={below}'`",
            )
    for name, other in SAME_VERSIONS:
        one, two = installed(name), installed(other)
        if one is not None and two is not None and one != two:
            yield Finding(
                f"{name} {one} with {other} {two}",
                "they have to have the same version, or JAX computes on the CPU",
                f"run `pip install '{name}=={two}'`",
            )


# --- The machine ---------------------------------------------------------------------


def check_devices() -> Findings:
    """What JAX computes on, and hardware that it does not see."""
    import jax

    from fedjax_graph.core import mesh
    from fedjax_graph.driver import memory

    devices = mesh.all_devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    yield Finding("devices", f"{len(devices)} ({kinds}), backend {mesh.backend()}")
    has_gpu = pathlib.Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")
    if has_gpu and mesh.backend() == "cpu":
        chosen = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        remedy = "run `pip install 'fedjax-graph[cuda]'`"
        if chosen:
            remedy = f"unset JAX_PLATFORMS, which is {chosen}"
        yield Finding("GPU", "there is one, and JAX computes on the CPU", remedy)
    if importlib.util.find_spec("libtpu") and mesh.backend() == "cpu":
        yield Finding("libtpu", "installed, and there is no TPU: --compile_for uses it")
    cores, free = mesh.num_cores(), memory.free_bytes()
    said = "unknown" if free is None else f"{free / 2**30:.1f} GiB free"
    yield Finding("CPU", f"{cores} core{'s' * (cores != 1)}; memory: {said}")


def check_disk() -> Findings:
    """Whether downloads and compiled programs can be kept."""
    from fedjax_graph.data.download import cache_folder

    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    remedy = "name another folder with FEDJAX_GRAPH_CACHE"
    if not os.access(there, os.W_OK):
        yield Finding("cache folder", f"{folder} is not writable", remedy)
    elif free < FREE_GIB:
        yield Finding("cache folder", f"{folder} has {free:.1f} GiB left", remedy)
    else:
        yield Finding("cache folder", f"{folder}, {free:.0f} GiB free")


def check_compiler() -> Findings:
    """Compiles and runs a small program, and compares it with NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    start = time.perf_counter()
    found = jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T))))(x)
    seconds = time.perf_counter() - start
    slope = 1 - np.tanh(x @ x.T) ** 2
    expected = (slope + slope.T) @ x
    if np.allclose(found, expected, atol=1e-2):
        yield Finding("compiler", f"a small program is right, {seconds:.1f} s")
    else:
        yield Finding(
            "compiler",
            "a small program gave wrong numbers",
            "install jax and jaxlib anew, and look at XLA_FLAGS: "
            f"{os.environ.get('XLA_FLAGS') or 'not set'}",
        )


# --- Data ----------------------------------------------------------------------------


def check_data(data_dir: str | None) -> Findings:
    """Which datasets are found where, and whether their files are those published."""
    from fedjax_graph.data import catalog, files

    try:
        folders = files.folders(data_dir)
    except InputError as error:
        yield Finding("data", str(error), "name a folder that exists")
        return
    missing = []
    for name, entry in catalog.DATASETS.items():
        path = entry.locate(name, data_dir) if entry.locate else None
        if path is not None:
            yield _located(name, path, folders)
        elif entry.locate:
            missing.append(name)
    if missing:
        said = "not here, which matters to `--dataset=` of those names only"
        yield Finding("data", f"{', '.join(missing)}: {said}")


def _located(name: str, path: pathlib.Path, folders: list[pathlib.Path]) -> Finding:
    """A dataset that is found, and how its files compare with those published.

    Args:
      name: of the dataset.
      path: of its readings, or of its folder.
      folders: in which, two levels deep, files of it may lie.
    """
    from fedjax_graph.data import download

    known, checked = download.digests(name), 0
    for folder, source in ((x, y) for x in folders for y in known.values()):
        for depth in ("", "*/", "*/*/"):
            for file in folder.glob(f"{depth}{source.filename}"):
                reason, checked = download.difference(file, source), checked + 1
                if reason:
                    return Finding(
                        f"data {name}",
                        f"{file} is not the published file ({reason})",
                        "move it away, then run `python -m experiments.datasets "
                        f"--dataset={name} --download`",
                    )
    others = "" if path.is_dir() or path.name in known else f"{path.name} not checked"
    right = f"digests right of {checked} published files" if checked else ""
    return Finding(
        f"data {name}", f"{path}; {', '.join(filter(None, (others, right)))}"
    )


# --- All of it -----------------------------------------------------------------------


def examine(data_dir: str | None = None) -> Findings:
    """Looks at everything in turn; what cannot be looked at is a problem as well."""
    checks: dict[str, Callable[[], Findings]] = {
        "versions": check_versions,
        "devices": check_devices,
        "cache folder": check_disk,
        "compiler": check_compiler,
        "data": functools.partial(check_data, data_dir),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # whatever a broken installation raises
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            remedy = "see the first problem, or install anew in a fresh environment"
            yield Finding(subject, f"cannot be looked at: {reason}", remedy)


def main(arguments: list[str] | None = None) -> int:
    """Prints what was found.

    Returns:
      The status: 0, or 1 where there is a problem.
    """
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m fedjax_graph.doctor", description=first, epilog=rest
    )
    parser.add_argument(
        "--data_dir",
        default=os.environ.get("FEDJAX_GRAPH_DATA"),
        help="folder with dataset files; by default $FEDJAX_GRAPH_DATA",
    )
    chosen = parser.parse_args(arguments)
    num_problems = 0
    with exits.in_one_line():
        for finding in examine(chosen.data_dir):
            print(finding.text(), flush=True)
            num_problems += finding.remedy is not None
        print(f"{num_problems} problem{'s' * (num_problems != 1)} found")
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
