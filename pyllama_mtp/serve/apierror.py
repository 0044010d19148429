"""Errors as the OpenAI API gives them: a status, and ``{"error": {...}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error response.

    Attributes:
        status: the HTTP status.
        param: the parameter at fault, or None.
        code: the error's name for programs, or None.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        about = {"param": self.param, "code": self.code}
        kind = kinds.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, **about}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is at fault."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """503: the server is ending."""
    why = "the server is shutting down; try again later"
    return ApiError(503, why, code="server_shutting_down")
