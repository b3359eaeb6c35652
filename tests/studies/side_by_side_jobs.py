"""What the processes of test_side_by_side.py run: light to import, and named by a word."""

import os
import time

import torch

from l2r.training.signals import stop_on_signals


def take(word, folder, *, display, report):
    """End as the word says; a file of that name is left by whoever could save."""
    report(f"preparing {word}")
    bar = display.add_task(word, total=2, numbers="")
    signal = None
    with stop_on_signals() as stop:
        # inside, as in training: from the first advance on others may end, and SIGTERM come
        display.update(bar, completed=1, numbers="halfway")
        if word == "crash":
            os._exit(3)
        if word == "raise":
            raise ModuleNotFoundError("no package", name="wandb")
        if word == "fail":
            return False, "loss is NaN", None
        if word.startswith("wait"):
            while not stop:
                time.sleep(0.01)
            signal = int(stop.signal)
    display.console.print(f"saving {word}", highlight=False)
    (folder / word).write_text(str(torch.get_num_threads()))
    display.update(bar, completed=2, numbers="done")
    return True, None, signal
