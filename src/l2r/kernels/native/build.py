"""Build ``forward.cpp`` and ``backward.cpp`` into one library, once.

The library is built on first use where a C++ compiler is found (some five seconds, said on the
log) and kept in ``$L2R_CACHE``, by default ``~/.cache/l2r``, under a name made of the source,
the flags, the compiler and the processor, in a folder of this user's: what others may have
written is not loaded. Without a compiler, or with ``L2R_CPU_KERNEL=off``,
torch operations run instead; the results agree to a few units of fp32 rounding.
``L2R_CPU_MARCH`` builds for another processor than this one (x86-64-v3: AVX2 without AVX-512).
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from l2r.files.cache import cache_folder

_FLAGS: tuple[str, ...] = (
    "-O3",
    f"-march={os.environ.get('L2R_CPU_MARCH', 'native')}",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
)
if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS += ("-mprefer-vector-width=512",)  # compilers choose 256 by default; 0.87 of the time
_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / "forward.cpp", _FOLDER / "backward.cpp"]
_HEADERS = [_FOLDER / f"{name}.h" for name in ("router", "products", "selection")]
_log = logging.getLogger("l2r")


def on_linux() -> bool:
    """Tell whether this is the system that the compiled kernel was tried on."""
    return sys.platform == "linux"


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels, built if needed; None if they cannot or must not be used."""
    if os.environ.get("L2R_CPU_KERNEL", "on" if on_linux() else "off") == "off":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        _log.info("no C++ compiler found; routers use torch operations on the CPU")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("the CPU router kernel could not be built, torch code runs: %s", reason)
        return None


def _build(compiler: str) -> Path:
    """Path of the library; compiled under a temporary name and renamed."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in (*_SOURCES, *_HEADERS)]
    parts = [*sources, " ".join(_FLAGS).encode(), version, processor()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = _private_folder()
    path = folder / f"cpu-kernel-{digest}.so"
    if _is_private(path):
        return path
    _log.warning("compiling the CPU router kernel, once, into %s", path)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        fresh = Path(room) / "kernel.so"
        subprocess.run(
            [compiler, "-std=c++17", *_FLAGS, "-fPIC", "-shared", *_SOURCES, "-o", fresh],
            capture_output=True,
            check=True,
            text=True,
        )
        fresh.chmod(0o700)
        fresh.replace(path)
    return path


def _private_folder() -> Path:
    """Folder of this user's kernels, or one for this process alone where that is not safe."""
    user = os.getuid() if hasattr(os, "getuid") else "own"
    folder = cache_folder() / f"kernels-{user}"  # a cache may be shared by several users
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_private(folder):
        return folder
    _log.warning("others may write in %s, so the CPU kernel is compiled again, elsewhere", folder)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(path: Path) -> bool:
    """Tell whether a file or folder exists, is no link, and is this user's alone to write."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    if not hasattr(os, "getuid"):  # such systems have no mode bits that say who may write
        return True
    existing = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)
    return existing and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def processor(info: Path = Path("/proc/cpuinfo")) -> bytes:
    """Facts on which -march=native depends, by the names of Linux on x86 and on Arm."""
    if not info.exists():
        return platform.machine().encode()
    names = (b"model", b"flags", b"Features", b"CPU ")
    return b"\n".join(sorted({s for s in info.read_bytes().splitlines() if s.startswith(names)}))
