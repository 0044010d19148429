"""Whatever fits the server's own description of its endpoints, or nearly does, is answered, or
refused with a reason."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ..marks import usual
from .conftest import Start

schemathesis: Any = pytest.importorskip("schemathesis")
hypothesis: Any = pytest.importorskip("hypothesis")

KEY = {"Authorization": "Bearer right"}
OPEN = ("/", "/health")


@pytest.mark.parametrize("n_examples", usual(24, long=[200]))
def test_no_request_is_the_servers_fault(start: Start, n_examples: int) -> None:
    """Every endpoint, with the key and without it."""
    server = start(api_key="right", max_tokens=4, n_ctx=256)
    url = f"{server.url}/openapi.json"
    assert httpx.get(url).status_code == 401
    schema = schemathesis.openapi.from_dict(httpx.get(url, headers=KEY).json())
    operations = [found.ok() for found in schema.get_all_operations()]
    paths = {operation.path for operation in operations}
    apis = ("completions", "chat/completions", "responses", "messages", "messages/count_tokens")
    assert {"/tokenize", *(f"/v1/{api}" for api in apis)} <= paths
    modes = schemathesis.GenerationMode
    usually = hypothesis.settings(
        max_examples=n_examples,
        deadline=None,
        database=None,
        derandomize=n_examples < 100,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    statuses = set[tuple[str, int]]()

    def check(case: Any) -> None:
        got = case.call(base_url=server.url, headers=KEY)
        statuses.add((case.path, got.status_code))
        assert got.status_code in (200, 400, 404, 405, 413, 415), got.text
        assert not server.generator.outcomes["error"], (case.body, got.text)
        if got.status_code != 200:
            assert got.json()["error"]["message"]
        got = case.call(base_url=server.url, headers={"Authorization": "Bearer wrong"})
        assert case.path in OPEN or got.status_code in (401, 404)

    for operation in operations:
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            if mode is modes.POSITIVE or operation.body:
                cases = operation.as_strategy(generation_mode=mode)
                usually(hypothesis.given(cases)(check))()
    answered = {path for path, status in statuses if status == 200}
    assert {"/v1/models", "/health", "/v1/completions", "/detokenize"} <= answered
    server.wait_until_idle()
    assert server.generator.broken is None and not server.generator.outcomes["error"]
