"""Write a second corpus, four domains of documentation from Debian, for the plan `transfer`.

Needs apt and dpkg. Prints each package's version, SHA-256 and licenses, under which its text stays.

    python scripts/proofs/debian_corpus.py debian-text
"""

import argparse
import gzip
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# domain: (packages, pattern of the files' paths inside them)
DOMAINS = {
    "kernel": (["linux-doc-6.1"], r"/_sources/(?!translations/).*\.rst\.txt$"),
    "perl": (["perl-doc"], r"\.pod$"),
    "manual": (["manpages", "manpages-dev"], r"/man/man\d/.*\.gz$"),
    "git": (["git-doc"], r"\.txt$"),
}


def unpack(package: str, below: Path) -> Path:
    """Download a package, print what it is and return the folder of its files."""
    place = below / package
    place.mkdir()
    subprocess.run(["apt-get", "download", "-q", package], cwd=place, check=True)
    (archive,) = place.glob("*.deb")
    fields = ["dpkg-deb", "-f", str(archive), "Version"]
    version = subprocess.run(fields, check=True, capture_output=True, text=True).stdout.strip()
    files = place / "files"
    subprocess.run(["dpkg-deb", "-x", archive, files], check=True)
    documents = files / "usr/share/doc" / package
    if documents.is_symlink():
        licenses = f"those of {documents.readlink()}"
    else:
        lines = (documents / "copyright").read_text(encoding="utf-8")
        licenses = "; ".join(sorted(set(re.findall(r"^License: *(.+)$", lines, re.MULTILINE))))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    print(f"{package} {version}, sha256 {digest}, licenses: {licenses}")
    return files


def read(path: Path) -> str:
    """Text of a file, compressed or not; empty for one that is not UTF-8."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return ""


def write_domain(folder: Path, packages: list[str], pattern: str) -> None:
    """Write each matching file of the packages once, named by its path."""
    with tempfile.TemporaryDirectory() as temporary:
        roots = [unpack(package, Path(temporary)) for package in packages]
        files = [(path, root) for root in roots for path in root.rglob("*") if path.is_file()]
        texts = {
            str(path.relative_to(root)).replace("/", "-"): read(path)
            for path, root in sorted(files)
            if not path.is_symlink() and re.search(pattern, str(path))
        }
    folder.mkdir(parents=True)
    for name, text in texts.items():
        if text.strip():
            (folder / f"{name.removesuffix('.txt')}.txt").write_text(text, encoding="utf-8")
    kept = [text for text in texts.values() if text.strip()]
    print(f"{folder.name}: {len(kept):,} files, {sum(map(len, kept)):,} characters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    out = parser.parse_args().folder
    if out.exists():
        sys.exit(f"{out} exists; give a folder that does not")
    for domain, (packages, pattern) in DOMAINS.items():
        write_domain(out / domain, packages, pattern)
