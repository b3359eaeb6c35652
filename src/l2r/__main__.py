"""``python -m l2r`` for launchers such as torchrun."""

from l2r.cli import main

main()
