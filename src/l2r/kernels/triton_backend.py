"""The Triton backend: every launch under the names that the registered operations call."""

from l2r.kernels.triton_launch import project, route, score, select
from l2r.kernels.triton_launch_backward import (
    project_backward,
    route_backward,
    score_backward,
    select_backward,
)

__all__ = [
    "project",
    "project_backward",
    "route",
    "route_backward",
    "score",
    "score_backward",
    "select",
    "select_backward",
]
