"""What is recorded of the machine: something useful, and nothing that identifies it."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

from pyllama_mtp.measure.machine import describe_machine


def test_the_record_describes_the_machine() -> None:
    machine = describe_machine(["a GPU"])
    assert set(machine) == {"cpu", "cores", "memory_bytes", "devices", "os", "arch", "python"}
    assert machine["cpu"] and machine["cores"] >= 1 and machine["devices"] == ["a GPU"]
    assert machine["python"] == platform.python_version()


def test_the_record_has_no_host_no_user_no_path(monkeypatch: object) -> None:
    text = json.dumps(describe_machine())
    private = {platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd()), os.sep}
    # A name so short that it may occur by chance proves nothing.
    assert not [word for word in private if len(word) > 3 and word in text]
