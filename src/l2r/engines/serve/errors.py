"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

_TYPES = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class RequestError(Exception):
    """A request that is refused: status, the field at fault if it is one, and a code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The whole answer to the request."""
        return JSONResponse(self.body(), self.status, headers)
