"""Let an environment find in another all that it has not itself.

    .tools-test/bin/python scripts/others/on_top.py .venv/bin/python

Run by the Python of the first; what it installs then comes before the other's.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [sys.argv[1], "-c", ask]
    below = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    line = f"import site; site.addsitedir({below!r})\n"  # reads its .pth files too
    (Path(sysconfig.get_path("purelib")) / "below.pth").write_text(line, encoding="utf-8")


if __name__ == "__main__":
    main()
