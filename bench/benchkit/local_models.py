"""A pytest plugin: what llama-cpp-python's tests download is taken from a folder instead.

The folder is named by PYLLAMA_DROPIN_MODELS; a model's file in it is called as its repository,
without the owner.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest


def hf_hub_download(repo_id: str, filename: str, **options: Any) -> str:
    """In place of huggingface_hub's: a local file, or the test is skipped."""
    path = Path(os.environ["PYLLAMA_DROPIN_MODELS"]) / f"{repo_id.rpartition('/')[2]}.gguf"
    if not path.is_file():
        pytest.skip(f"nothing stands in for {repo_id}")
    return str(path)


def pytest_configure() -> None:
    """Before the test modules import it."""
    huggingface_hub.hf_hub_download = hf_hub_download
