"""Models of a hub: a fake one listens on the loopback."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pyllama_mtp.errors import HubQuantError
from pyllama_mtp.models.hub import choose, head_of, mmproj_of

from ..marks import usual
from ..models.test_parts import write_parts
from ..processes import Program, RunPython, environment, start

NOWHERE = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# -- which files are meant -------------------------------------------------------------------------

FILES = [
    "README.md",
    "mmproj-F16.gguf",
    "mtp-Qwen-Q8_0.gguf",
    "mtp-Qwen-Q4_K_M.gguf",
    "Qwen-UD-Q4_K_M.gguf",
    "Qwen-Q4_K_M.gguf",
    "BF16/Qwen-BF16-00001-of-00002.gguf",
    "BF16/Qwen-BF16-00002-of-00002.gguf",
    "Qwen-Q3_K_M-00001-of-00002.gguf",  # its second part is not there
]


def test_a_quant_names_a_model() -> None:
    """The only model needs no quant."""
    for names, quant, files in (
        (FILES, None, ["Qwen-Q4_K_M.gguf"]),
        (FILES, "q4_k_m", ["Qwen-Q4_K_M.gguf"]),
        (FILES, "UD-Q4_K_M", ["Qwen-UD-Q4_K_M.gguf"]),
        (FILES, "Qwen-Q4_K_M.gguf", ["Qwen-Q4_K_M.gguf"]),
        (FILES, "*n-Q4_K_M.gguf", ["Qwen-Q4_K_M.gguf"]),
        (FILES, "*BF16*", [f"BF16/Qwen-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        (FILES, "BF16", [f"BF16/Qwen-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        (["x.gguf", "mtp-x.gguf"], None, ["x.gguf"]),
    ):
        assert choose("o/r", names, quant) == files


def test_what_is_not_clear_is_listed() -> None:
    for names, quant, message in (
        (FILES, "Q8_0", "no Q8_0.*BF16/Qwen-BF16\n  Qwen-Q4_K_M\n  Qwen-UD-Q4_K_M$"),
        (FILES, "Q3_K_M", "no Q3_K_M"),
        (["a-Q8_0.gguf", "a-F16.gguf"], None, "no Q4_K_M; .*:QUANT"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several Q8_0"),
        (["a.safetensors", "mtp-a.gguf"], None, "no .gguf model"),
    ):
        with pytest.raises(HubQuantError) as caught:
            choose("o/r", names, quant)
        assert re.search(message, str(caught.value), re.S)


def test_the_head_that_is_most_like_the_model() -> None:
    assert head_of("Qwen-Q4_K_M.gguf", FILES) == "mtp-Qwen-Q4_K_M.gguf"
    assert head_of("BF16/Qwen-BF16-00001-of-00002.gguf", FILES) is not None
    assert head_of("x.gguf", ["sub/mtp-x.gguf", "x.gguf"]) is None
    for model in ("x.gguf", "BF16/x.gguf", "MTP/x.gguf"):
        assert head_of(model, ["MTP/mtp-x.gguf"]) == "MTP/mtp-x.gguf"
    assert head_of("x.gguf", ["sub/MTP/mtp-x.gguf"]) is None
    assert head_of("x.gguf", ["mtp-y.gguf"]) is None, "beside the model it would not be found"


def test_the_encoder_of_the_model() -> None:
    """In the model's folder or above; F16 before other types."""
    types = [f"mmproj-{kind}.gguf" for kind in ("BF16", "F16", "F32", "Q8_0")]
    assert mmproj_of("x-Q4_K_M.gguf", types) == "mmproj-F16.gguf"
    assert mmproj_of("BF16/x-BF16-00001-of-00002.gguf", FILES) == "mmproj-F16.gguf"
    assert mmproj_of("x.gguf", ["sub/mmproj-F16.gguf", "mtp-x.gguf"]) is None


# -- downloads -------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """Repositories by name: their files' contents by name.

    Attributes:
        stop_at: bytes of a file after which its connection stands still, once.
        stopped: set when one does.
        ranges: the Range header of each GET of a file.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.stop_at = repositories, 0
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.ranges: list[str | None] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def environment(self, folder: Path) -> dict[str, str]:
        host, port = self.server_address[:2]
        return {
            "HF_ENDPOINT": f"http://{host!s}:{port}",
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",  # else it asks again after 10 s
        }


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/models/(\w+/\w+)(\?.*)?", self.path):
            self._list(found[1])
        elif found := re.fullmatch(rf"/(\w+/\w+)/resolve/{COMMIT}/(.+)", self.path):
            self._send_file(self.server.repositories[found[1]][found[2]], found[1])
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _list(self, name: str) -> None:
        if name == "o/private":
            return self._refuse(401, "RepoNotFound")
        files = self.server.repositories.get(name)
        if files is None:
            return self._refuse(404, "RepoNotFound")
        siblings = [{"rfilename": file} for file in files]
        body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        self._begin(200, {"Content-Type": "application/json", "Content-Length": len(body)})
        self.wfile.write(body)

    def _send_file(self, data: bytes, name: str) -> None:
        if name == "o/gated":
            return self._refuse(403, "GatedRepo")
        begin, digest, size = 0, hashlib.sha256(data).hexdigest(), len(data)
        asked = None
        if self.command == "GET":
            asked = self.headers["Range"]
            self.server.ranges.append(asked)
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            begin, data = int(first), data[: int(last) + 1] if last else data
        length = len(data) - begin
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Content-Length": length}
        if asked:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{size}"
        self._begin(206 if asked else 200, headers)
        if self.command == "GET":
            stop_at, self.server.stop_at = self.server.stop_at, 0
            if stop_at:
                self.wfile.write(data[:stop_at])
                self.wfile.flush()
                self.server.stopped.set()
                self.server.go_on.wait(300)
            else:
                self.wfile.write(data[begin:])

    def _refuse(self, status: int, code: str) -> None:
        self._begin(status, {"X-Error-Code": code, "Content-Length": 0})

    def _begin(self, status: int, headers: dict[str, object]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(demo_file: Path) -> Iterator[Hub]:
    demo = demo_file.read_bytes() + bytes(30_000_000)
    files = {"demo-F16.gguf": demo, "demo-Q8_0.gguf": b"not this", "mtp-demo-F16.gguf": b"nor this"}
    with Hub({"o/r": files, "o/gated": files}) as server:
        yield server
        server.go_on.set()
        server.shutdown()


@pytest.mark.long
def test_a_download_goes_on_where_it_stopped(hub: Hub, program: Program, tmp_path: Path) -> None:
    """A file in the cache is read without a network."""
    hub.stop_at = 25_000_000  # huggingface_hub writes 10 MiB at a time
    env = environment(**hub.environment(tmp_path))
    command = ("generate", "-n", "4", "def f", "-m")
    first = start(*command, "hf:o/r:F16", cwd=tmp_path, env=env)
    assert hub.stopped.wait(60)
    blobs = tmp_path / "hub" / "models--o--r" / "blobs"
    while sum(file.stat().st_size for file in blobs.glob("*")) < 20 << 20:
        assert first.poll() is None
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130 and b"Traceback" not in err
    hub.go_on.set()
    assert program(*command, "hf:o/r:f16", env=env).stdout.strip()
    before, after = hub.ranges
    assert before is None and after == f"bytes={20 << 20}-"
    assert [file.suffix for file in blobs.iterdir()] == [""], "one file, nothing partial"
    assert b"hf:o/r/demo-F16.gguf" in program("inspect", "hf:o/r:F16", env=env).stdout
    env["HF_ENDPOINT"] = NOWHERE
    assert program(*command, "hf:o/r:F16", env=env).stdout.strip()
    assert len(hub.ranges) == 2


def test_inspect_reads_the_header_only(
    hub: Hub, program: Program, tmp_path: Path, demo_file: Path
) -> None:
    """And says what it says of the whole file."""
    env = environment(**hub.environment(tmp_path))
    told = json.loads(program("inspect", "hf:o/r:F16", "--json", env=env).stdout)
    of_file = json.loads(program("inspect", demo_file, "--json").stdout)
    assert told.pop("path") == "hf:o/r/demo-F16.gguf"
    assert told.pop("size") == of_file.pop("size") + 30_000_000
    assert told["memory"]["mtp"]["total"] == of_file["memory"]["mtp"]["total"]
    assert {**told, "memory": 0, "path": 0} == {**of_file, "memory": 0, "path": 0}
    ends = [re.findall(r"\d+", asked or "") for asked in hub.ranges]
    assert ends and sum(int(last) - int(first) + 1 for first, last in ends) < 3 << 20
    assert not [*tmp_path.rglob("*.gguf")]


SNIPPET = """
from pyllama_mtp import Llama
llm = Llama.from_pretrained(repo_id="o/r", filename="*F16.gguf", verbose=False, n_ctx=256)
asked = [{"role": "user", "content": "What is a list?"}]
print(llm.create_chat_completion(messages=asked, max_tokens=8)["choices"][0]["message"]["content"])
"""


def test_the_snippet_of_a_page_runs(hub: Hub, run_python: RunPython, tmp_path: Path) -> None:
    done = run_python(SNIPPET, env=hub.environment(tmp_path))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


REFUSED = """
import json, sys
from pyllama_mtp import Model
said = {}
for name in sys.argv[1:]:
    repository, _, quant = name.partition(":")
    try:
        Model.from_pretrained(repository, quant=quant or None)
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


def test_what_cannot_be_fetched_is_told(hub: Hub, run_python: RunPython, tmp_path: Path) -> None:
    cases = {
        "o/none": ("HubRepositoryError", "no repository .*/o/none; check how it is written"),
        "o/private": ("HubRepositoryError", "If it is private, .*HF_TOKEN"),
        "o/gated:F16": ("HubTokenError", "is gated: accept its terms .*HF_TOKEN"),
        "nonsense": ("UsageError", "'nonsense' is not OWNER/REPO"),
    }
    done = run_python(REFUSED, *cases, env=hub.environment(tmp_path))
    told = json.loads(done.stdout)
    for name, (kind, message) in cases.items():
        assert told[name][0] == kind and re.search(message, told[name][1], re.S), told[name]


@pytest.mark.parametrize(
    ("variables", "message"),
    usual(
        ({"HF_ENDPOINT": NOWHERE}, b"cannot be reached .*give its path"),
        long=[({"HF_HUB_OFFLINE": "1"}, b"HF_HUB_OFFLINE is set; .*give its path")],
    ),
)
def test_no_network_and_nothing_in_the_cache(
    program: Program, tmp_path: Path, variables: dict[str, str], message: bytes
) -> None:
    env = environment(HF_HOME=str(tmp_path), **variables)
    done = program("generate", "-m", "hf:o/r", "x", code=2, env=env)
    assert re.search(message, done.stderr), done.stderr


FETCHED = """
import json, sys
from pyllama_mtp.models.hub import fetch
first = fetch(*sys.argv[1:])
print(json.dumps([first.name, {file.name: file.stat().st_size for file in first.parent.iterdir()}]))
"""


def test_parts_a_head_and_an_encoder_come_along(
    hub: Hub, run_python: RunPython, tmp_path: Path, demo_file: Path
) -> None:
    """A model in parts without a head: head and image encoder of the folder above are put beside
    the parts."""
    parts = {
        f"Q8_0/demo-Q8_0-{file.name[2:]}": file for file in write_parts(demo_file, tmp_path, 40)
    }
    files = {name: file.read_bytes() for name, file in parts.items()}
    key = b"nextn_predict_layers" + (4).to_bytes(4, "little")
    for name, data in files.items():
        files[name] = data.replace(key + b"\1", key + b"\0").replace(b".nextn.", b".other.")
    heads = {"mtp-demo.gguf": b"head", "mtp-other.gguf": b""}
    encoders = {"mmproj-BF16.gguf": b"", "mmproj-F16.gguf": b"encoder"}
    hub.repositories["o/split"] = {**files, **heads, **encoders}
    done = run_python(FETCHED, "o/split", "Q8_0", env=hub.environment(tmp_path / "home"))
    name, beside = json.loads(done.stdout)
    assert name == "demo-Q8_0-00001-of-00003.gguf"
    others = {"mtp-demo.gguf": 4, "mmproj-F16.gguf": 7}
    assert beside == {Path(one).name: len(files[one]) for one in files} | others
