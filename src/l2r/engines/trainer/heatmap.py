"""The experts' loads as a picture in TensorBoard, one for each logged step."""

import importlib.util
from typing import Any

from l2r.analysis.diagnostics import RouterStatistics


def draw(writer: Any, statistics: RouterStatistics, step: int) -> None:
    """Add the picture to a SummaryWriter; nothing for another logger, or without Pillow."""
    if hasattr(writer, "add_image") and importlib.util.find_spec("PIL") is not None:
        writer.add_image("router/load", statistics.picture().numpy(), step)
