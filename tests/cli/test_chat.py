"""`pyllama-mtp chat` as a user has it: in a terminal, and with a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyllama_mtp import Model

from ..processes import Program

QUICK = ("--threads", "1", "--n-ctx", "2048", "--temperature", "0")
QUESTION = "What does str.split() do?"


class Terminal:
    """A program with a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pyllama_mtp", "chat", *QUICK, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**os.environ, "XDG_STATE_HOME": str(folder), "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=self._take_terminal,
        )
        os.close(slave)
        self.text = ""

    @staticmethod
    def _take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def shows(self, words: str, seconds: float) -> bool:
        """Whether `words` come; the program may be silent for so long."""
        while words not in self.text:
            if not select.select([self._master], [], [], seconds)[0]:
                return False
            try:
                self.text += os.read(self._master, 4096).decode(errors="replace")
            except OSError:
                return words in self.text
        return True

    def wait_for(self, words: str) -> str:
        """The output up to `words` and with them."""
        assert self.shows(words, 120), f"{words!r} does not come: {self.text!r}"
        shown, _, self.text = self.text.partition(words)
        return shown + words

    def ask(self, line: str, words: str = "> ") -> str:
        """Type a line; the output up to `words`."""
        self.type(f"{line}\n")
        return self.wait_for(words)

    def end(self) -> int:
        """Read the output to its end; returns the exit code."""
        with contextlib.suppress(OSError):
            while os.read(self._master, 4096):
                pass
        return self.process.wait(120)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def run(*arguments: str) -> Terminal:
            terminal = Terminal(tmp_path, *arguments)
            stack.callback(terminal.close)
            terminal.wait_for("> ")
            return terminal

        yield run


def test_a_conversation_in_a_terminal(open_chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = open_chat("-n", "20")
    left = "\x1b[D"
    assert "method" in terminal.ask(f"What does str.splix() do?{6 * left}\x7ft\x01")
    assert QUESTION in terminal.ask("\x1b[A"), "the last question again"
    assert "kept from before" in terminal.ask("/stats"), "only what is new is processed"
    terminal.ask("/reset")
    terminal.type("\x04")
    assert terminal.end() == 0
    history = tmp_path / "pyllama-mtp" / "chat-history"
    assert QUESTION in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_thought_is_dimmed(open_chat: Callable[..., Terminal]) -> None:
    terminal = open_chat("-n", "40", "--reasoning-budget", "10")
    for line in ("What does this function do?", "def g(a, b):"):
        terminal.ask(line + "\\", ". ")
    thought = terminal.ask("    return a", "\x1b[0m")
    assert "\x1b[2mThe user asks" in thought and "think>" not in thought
    assert terminal.wait_for("> ").removesuffix("> ").strip(), "nothing is answered"


def test_ctrl_c_ends_the_answer_and_not_the_program(open_chat: Callable[..., Terminal]) -> None:
    terminal = open_chat()
    terminal.ask(QUESTION, "`str")
    terminal.type("/set ignored\x15")  # typed ahead, and taken back
    terminal.type("\x03")
    terminal.wait_for("> ")
    for _ in range(8):  # one that comes between the prompt's display and its reading is lost
        time.sleep(0.2)
        terminal.type("\x03")
        if terminal.shows("Ctrl-C again", 5):
            break
    terminal.wait_for("> ")
    shown = terminal.ask("/set max_tokens 5\n/retry\n/stats", "tokens written")
    assert "answer     5 tokens" in shown
    terminal.type("/quit\n")
    assert terminal.end() == 0


def test_ctrl_c_twice_leaves(open_chat: Callable[..., Terminal]) -> None:
    terminal = open_chat()
    for _ in range(12):
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            terminal.type("\x03")
            if terminal.shows("interrupted", 0.5):
                break
    assert "Ctrl-C again, Ctrl-D or /exit: leave" in terminal.text
    assert "pyllama-mtp: interrupted" in terminal.text and terminal.end() == 130


def test_a_pasted_text_is_one_question(open_chat: Callable[..., Terminal]) -> None:
    terminal = open_chat("-n", "4")
    terminal.type("\x1b[200~/here is my code:\ndef f(x):\n\n    return x\x1b[201~")
    terminal.type("\n/exit\n")
    assert not terminal.shows("until it ends", 60)
    assert terminal.text.count("no room to go on") == 1 and "error" not in terminal.text
    assert "\x1b[?2004h" in terminal.text, "the terminal is not asked to mark what is pasted"
    assert terminal.end() == 0


def test_a_model_without_a_template(
    in_process: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told at the start, with the ways out; a template may be given."""
    monkeypatch.setattr(Model, "chat_template", "")
    model = (*QUICK, "-n", "2")
    said = in_process("chat", *model, input=b"Hello\n", code=2).stderr.decode()
    assert "has no chat template, so it cannot chat" in said and "--chat-template" in said
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    for template in ("gemma", "t.jinja"):
        done = in_process("chat", *model, "--chat-template", template, input=b"Hello\n")
        assert done.stdout and b"error" not in done.stderr
    (tmp_path / "t.jinja").write_text("{{ messages[0].content")
    bad = in_process("chat", *model, "--chat-template", "t.jinja", code=2).stderr
    assert b"chat template cannot render" in bad
    bad = in_process("chat", *model, "--chat-template", "chatlm", code=2).stderr
    assert b"cannot read the chat template file chatlm" in bad


def test_questions_from_a_pipe(in_process: Program) -> None:
    script = f"{QUESTION}\n/set temperature -1\n/set stats maybe\n/nonsense\n/rset\n/stats\n/set\n"
    questions = script.encode() + b"caf\xe9\n"
    done = in_process("chat", *QUICK, "-n", "12", input=questions, code=2)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "\x1b" not in out
    assert out.startswith("`str") and "temperature           0.0" in out
    assert len(out[out.index("thinking ") :].splitlines()) <= 12, "more than a window holds"
    assert "temperature is -1" in err and "stats is 'maybe'" in err
    assert "the question is not UTF-8: byte 0xe9 at offset 3" in err
    assert (
        "no /nonsense; /help" in err
        and "no /rset; did you mean /reset?" in err
        and "answer     12 tokens" in err
    )
