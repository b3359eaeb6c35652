"""What the peers publish, fetched by pip into a cache folder."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@dataclass(frozen=True)
class Engine:
    """A training engine. packages: what to install without dependencies, itself first."""

    title: str
    packages: Sequence[str]


# OLMo-core imports clients of two object stores with its configuration; it never calls them here.
_STORES = (
    "cached-path boto3 botocore s3transfer jmespath google-api-core google-auth google-cloud-core "
    "google-cloud-storage google-crc32c google-resumable-media googleapis-common-protos protobuf "
    "proto-plus pyasn1 pyasn1-modules cryptography cffi pycparser"
)
ENGINES = {
    "TestMegatron": Engine("Megatron-core", ("megatron-core",)),
    "TestOlmoCore": Engine(
        "OLMo-core", ("ai2-olmo-core", "dataclass-extensions", "bettermap", *_STORES.split())
    ),
    "TestTutel": Engine("Tutel", ("tutel",)),
}


def transformers_tests(cache: Path, absent: Path) -> Path:
    """Folder whose ``tests`` are those of the installed transformers.

    ``absent`` fills in what the source distribution leaves out but its tests import.
    """
    version = transformers.__version__
    folder = cache / f"transformers-{version}"
    if not (folder / "tests").is_dir():
        command = ["download", "--no-deps", "--no-binary", ":all:", "-d", str(cache)]
        subprocess.run([*_PIP, *command, f"transformers=={version}"], check=True)
        with tarfile.open(cache / f"transformers-{version}.tar.gz") as archive:
            members = [m for m in archive if m.name.startswith(f"transformers-{version}/tests")]
            archive.extractall(cache, members, filter="data")
    for path in absent.rglob("*.py"):
        target = folder / "tests" / path.relative_to(absent)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def tools_of_tests(cache: Path) -> Path:
    """Folder with what those tests import and this project does not need."""
    folder = cache / "tools"
    if not folder.is_dir():
        _install(folder, ["parameterized"])
    return folder


def engine_packages(cache: Path, engine: Engine) -> Path | str:
    """Folder with an engine, or why there is none."""
    folder = cache / engine.packages[0]
    if not folder.is_dir():
        try:
            _install(folder, engine.packages)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
            return lines[-1].removeprefix("ERROR: ") if lines else "it could not be installed"
    return folder


def _install(folder: Path, packages: Sequence[str]) -> None:
    """Install into a folder of its own, whole or not at all, leaving the environment alone."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    command = ["install", "--quiet", "--no-deps", "--target", str(part), *packages]
    subprocess.run([*_PIP, *command], check=True, capture_output=True, text=True)
    part.replace(folder)
