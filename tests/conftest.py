"""What tests share: the demo model, a tiny mixture of experts, real text, and a second interpreter.

Nothing here is loaded unless a test asks for it: tests of the sources alone need no native library.
"""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from .marks import usual

if TYPE_CHECKING:
    from pyllama_mtp import Model

    from .processes import Cli, Program, RunPython

ROOT = Path(__file__).resolve().parents[1]
if not [*ROOT.glob("pyllama_mtp/_native*")]:
    # `python -m pytest` puts the checkout first, whose sources have no native library.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT]


def pytest_configure() -> None:
    """Give each worker a core."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        keep_to_one_core(int(worker.removeprefix("gw")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """No search for garbage while modules are imported, nor among them later: they stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def keep_to_one_core(number: int) -> None:
    """Give a worker of ``pytest -n``, and the processes that it starts, a core of their own.

    Threads of a model wait for each other, so two that other workers disturb are many times slower
    than one. Sessions of a worker therefore have one thread, if a test asks for no more.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        shift = os.getppid()  # so that two runs at once do not begin at the same core
        os.sched_setaffinity(0, {cores[(number + shift) % len(cores)]})


@pytest.fixture(scope="session")
def n_gpu_layers() -> int:
    """Layers of the shared models that are kept on a GPU, where there is one; -1: all, 0: none."""
    return int(os.environ.get("PYLLAMA_TEST_N_GPU_LAYERS", "-1"))


class FakePeers:
    """A folder with programs that speak as llama-server and llama-bench do, and what they got."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "log.jsonl"
        self.environment = {"PYLLAMA_MTP_PEERS": str(folder), "FAKE_LOG": str(self._log)}
        source = Path(__file__).parent / "measure" / "peers" / "fake_program.py"
        for name in ("llama-server", "llama-bench"):
            program = folder / name
            program.write_text(f"#!{sys.executable}\n{source.read_text()}")
            program.chmod(0o755)

    def log(self, key: str) -> list[Any]:
        """What the programs said they were given: "arguments", "request", "pid"."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line[key] for line in map(json.loads, lines) if key in line]


@pytest.fixture
def fake_peers(tmp_path_factory: pytest.TempPathFactory) -> FakePeers:
    """Programs in place of upstream's; `environment` makes them found."""
    return FakePeers(tmp_path_factory.mktemp("peers"))


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program of upstream's is found on this machine."""
    monkeypatch.delenv("PYLLAMA_MTP_PEERS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("pyllama_mtp.measure.peers.BUILD_FOLDER", tmp_path)


@pytest.fixture
def peers(fake_peers: FakePeers, no_peers: None, monkeypatch: pytest.MonkeyPatch) -> FakePeers:
    """The fake programs, where the package looks for the real ones."""
    for name, value in fake_peers.environment.items():
        monkeypatch.setenv(name, value)
    return fake_peers


@pytest.fixture
def ended() -> Callable[[int], bool]:
    """Whether a process has ended and left nothing behind."""

    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] == "Z" and int(stat.split()[3]) != os.getpid()

    return check


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model that the package ships."""
    from pyllama_mtp.models.demo import demo_path

    return demo_path()


@pytest.fixture
def told(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[dict[str, Any]], dict[str, Any], str]]:
    """What the demo model's template is told, and says: messages, variables, text of each call."""
    found: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = []
    plain = demo.apply_chat_template

    def listen(messages: Any, **variables: Any) -> str:
        found.append((messages, variables, plain(messages, **variables)))
        return found[-1][2]

    monkeypatch.setattr(demo, "apply_chat_template", listen)
    return found


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with random weights."""
    from pyllama_mtp.models.synth import write_synthetic

    return write_synthetic(tmp_path_factory.mktemp("models") / "dense.gguf", "tiny", "q8_0")


@pytest.fixture(scope="session")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts model with random weights."""
    from pyllama_mtp.models.synth import write_synthetic

    return write_synthetic(tmp_path_factory.mktemp("moe") / "moe.gguf", "tiny-moe", "f16")


@pytest.fixture(scope="session")
def demo_prompts(demo: Model) -> list[str]:
    """The shipped prompts of all four classes, chat ones rendered by the model's template."""
    from pyllama_mtp.models.demo import demo_path

    prompts = []
    for line in demo_path().with_name("prompts.jsonl").read_text().splitlines():
        record = json.loads(line)
        text = record["prompt"]
        if record["chat"]:
            text = demo.apply_chat_template([{"role": "user", "content": text}])
        prompts.append(text)
    return prompts


@pytest.fixture(scope="session")
def text(demo: Model, demo_prompts: list[str]) -> list[int]:
    """Token ids of real text, longer than every edge."""
    from .regression.support import long_text

    return long_text(demo, demo_prompts)


@pytest.fixture(scope="session")
def gap(demo: Model, text: list[int]) -> float:
    """How far two logits may lie apart and still change places by rounding."""
    from .regression.support import rounding

    return rounding(demo, text[:97])


@pytest.fixture(scope="session")
def next_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of architecture qwen3next with random weights."""
    from .architectures import write_model

    return write_model("qwen3next", tmp_path_factory.mktemp("next") / "next.gguf")


@contextmanager
def loading_at_once() -> Iterator[None]:
    """Load files, which are known to be good, without a child process that tries each first."""
    from pyllama_mtp.llama import trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "is_child", True)
        yield


@pytest.fixture(scope="module")
def at_once() -> Iterator[None]:
    """Of a module whose files are good; see `loading_at_once`."""
    with loading_at_once():
        yield


def loaded(file: str) -> Any:
    """A fixture: the model of the fixture `file`, loaded once."""

    @pytest.fixture(scope="session")
    def model(request: pytest.FixtureRequest, n_gpu_layers: int) -> Iterator[Model]:
        from pyllama_mtp import Model

        with loading_at_once():
            found = Model(request.getfixturevalue(file), n_gpu_layers=n_gpu_layers)
        with found:
            yield found

    return model


demo, moe, qwen3next = map(loaded, ("demo_file", "moe_file", "next_file"))


@pytest.fixture(params=usual("demo", "qwen3next", long=["moe"]))
def model(request: pytest.FixtureRequest) -> Model:
    """A dense model, and another architecture; among the long tests a mixture of experts, too."""
    found: Model = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def prompts(demo: Model, demo_prompts: list[str]) -> list[list[int]]:
    """Token ids of the demo model's prompts."""
    return [demo.tokenize(prompt, parse_special=True) for prompt in demo_prompts]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("matrix", "--repeat", "1")` -> code, out, err."""
    from pyllama_mtp.cli import main

    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def in_process(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """As `program`, but in this process, which saves the start of one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(
        *arguments: object, code: int = 0, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        done = cli(*arguments)
        assert done.code == code, (done.code, done.err)
        return subprocess.CompletedProcess([], code, done.out.encode(), done.err.encode())

    return run


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`program("matrix", "--repeat", "1")` -> the finished process; it ran in `tmp_path` and has
    ended with `code`, never with a traceback."""
    from .processes import environment

    def run(
        *arguments: object, code: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "pyllama_mtp", *map(str, arguments)]
        usual = {"cwd": tmp_path, "timeout": 120, "env": environment(COLUMNS="80")}
        done = subprocess.run(command, capture_output=True, **{**usual, **options})
        said = done.stderr.decode()
        assert done.returncode == code and "Traceback" not in said, (done.returncode, said)
        return done

    return run


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> RunPython:
    """Runs code in a new interpreter: odd loads, crashes, a second variant."""
    from .processes import environment

    folder = tmp_path_factory.mktemp("run")

    def run(
        code: str, *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        script = folder / f"script{len(list(folder.iterdir()))}.py"
        script.write_text(code)
        return subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=float(os.environ.get("PYLLAMA_TEST_TIME_LIMIT", "300")),
            env=environment(**(env or {})),
        )

    return run


def archive_of(pin: str) -> Path:
    """The source archive of a pin in vendor/, whose hash is checked."""
    vendor = Path(__file__).resolve().parents[1] / "vendor"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(vendor)
        import fetch

        found: Path = fetch.verified_archive(fetch.read_pin(vendor / pin))
        return found


@pytest.fixture(scope="session")
def pinned_archive() -> Path:
    """The archive that this package was built from."""
    return archive_of("llama-cpp.pin")


@pytest.fixture(scope="session")
def real_vocabulary(pinned_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5's tokens; beside them texts (.inp), and the tokens that upstream's tests expect of
    these (.out)."""
    folder = tmp_path_factory.mktemp("real")
    with tarfile.open(pinned_archive) as archive:
        for member in archive:
            member.name = Path(member.name).name
            if member.name.startswith("ggml-vocab-qwen35.gguf"):
                archive.extract(member, folder, filter="data")
    return folder / "ggml-vocab-qwen35.gguf"


@pytest.fixture(scope="session")
def llama_cpp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the Python sources of the drop-in's llama-cpp-python."""
    folder = tmp_path_factory.mktemp("llama-cpp-python")
    with tarfile.open(archive_of("drop-in.pin")) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if path.startswith("llama_cpp/"):
                member.name = path
                archive.extract(member, folder, filter="data")
            elif path.startswith("vendor/"):
                break  # the rest of the archive is llama.cpp: 75 MB
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium, driven by its chromedriver, whose console is kept.

    Where there is none, tests are skipped; with PYLLAMA_MTP_REQUIRE_BROWSER set they fail instead.
    """
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    driver = shutil.which("chromedriver")
    if not (program and driver):
        missing = "Chromium" if driver else "chromedriver"
        reason = f"{missing} is not installed (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("PYLLAMA_MTP_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    if os.environ.get("PYLLAMA_MTP_REQUIRE_BROWSER"):
        import selenium.webdriver as webdriver
    else:
        webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(120)
    chrome.set_script_timeout(120)
    yield chrome
    chrome.quit()
