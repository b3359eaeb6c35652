"""Settings of the paper's downstream tasks; read without torch, before anything is loaded."""

from dataclasses import dataclass

from l2r.errors import InputError


@dataclass(frozen=True)
class TaskSettings:
    """Settings that change an accuracy besides the weights; see :func:`evaluate_tasks`."""

    split: str = "val"
    limit: int | None = None
    requests: int | None = None
    max_length: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.split not in ("val", "test"):
            raise InputError(f"split must be val or test; got {self.split!r}")
        for name, least in (("limit", 1), ("requests", 1), ("max_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = name.removeprefix("max_")
                raise InputError(f"{option} must be >= {least}; got {value}")
        if self.limit is not None and self.requests is not None:
            raise InputError(f"give limit or requests, not both; got {self.limit}, {self.requests}")
