"""Errors as the OpenAI API gives them: a status, and ``{"error": {...}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a client is told when it does not get an answer.

    Attributes:
        status: of HTTP.
        param: the parameter that is to blame, or None.
        code: a word for programs, or None.
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
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 401:
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change its request."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """503: the server ends."""
    return ApiError(
        503, "the server is shutting down; try again later", code="server_shutting_down"
    )
