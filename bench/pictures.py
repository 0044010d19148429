#!/usr/bin/env python3
"""Draw the pictures of README and docs/ into docs/pictures: python bench/pictures.py [NAME ...]

speed.svg and context.svg quote bench/results; terminal.svg, server.png and report.png run programs.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

from benchkit import RESULTS, ROOT
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.text import Text

from pyllama_mtp import bench
from pyllama_mtp.measure.page import picture, theme

PROGRAM = str(Path(sys.executable).with_name("pyllama-mtp"))


def speed() -> bytes:
    """Decoding, compared with llama-server's, as `pyllama-mtp report` draws it."""
    found = bench.read(RESULTS / "golden.jsonl").cells
    return picture([cell for cell in found if cell.n_max != 2], "models")


def context() -> bytes:
    """What `auto` gains by length of the context, from the table of long.md."""
    part = (RESULTS / "long.md").read_text("utf-8").partition("<!-- contexts -->\n")[2]
    table = re.findall(r"^\|(.*)\|$", part.partition("\n<!-- ")[0], re.M)
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in table]
    found, data = [dict(zip(head, cells, strict=True)) for cells in rows], io.BytesIO()
    lengths = [*dict.fromkeys(row["after"] for row in found)]
    with theme():
        axes = (figure := Figure(figsize=(8.4, 3.9))).subplots()
        for number, file in enumerate(dict.fromkeys(row["file"] for row in found)):
            gains = [float(row["auto to no MTP"]) for row in found if row["file"] == file]
            places = [place + 0.27 * (number - 1) for place in range(len(gains))]
            bars = axes.bar(places, gains, 0.26, label=file)
            axes.bar_label(bars, [f"{gain:.2f}" for gain in gains], fontsize="x-small")
        axes.axhline(1, color="gray", linestyle="--")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set(xlabel="tokens of context", ylabel="decode with auto, to no MTP")
        axes.set_title("One sample each; random weights, heads that draft well", fontsize="medium")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()


def terminal() -> bytes:
    """A chat with the demo model that sees, as SVG."""
    chat = f"stty cols 100; {PROGRAM} chat -m vision-demo -t 1 --stats"
    said = "/image docs/shapes.png\nWhat does the picture show?"
    keys = f"(sleep 4; echo '{said}'; sleep 3; echo /exit) | script -qec '{chat}' /dev/null"
    out = subprocess.check_output(["bash", "-c", keys], cwd=ROOT, text=True)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print("$ pyllama-mtp chat -m vision-demo --stats", highlight=False)
    for line in Text.from_ansi(out.replace("\r", "")).split():
        if line.plain.strip() and "loading the model" not in line.plain:
            console.print(line)
    drawn = console.export_svg(title="pyllama-mtp chat", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S).encode()


def screenshot(page: Path, height: int) -> bytes:
    """A page, 960 pixels wide: a PNG of 64 colours."""
    options = [f"--window-size=960,{height}", "--hide-scrollbars", "--virtual-time-budget=60000"]
    options += [f"--user-data-dir={page.parent}", f"--screenshot={page.parent}/page.png"]
    browser = ["chromium", "--headless", "--no-sandbox", *options, page.as_uri()]
    subprocess.run(browser, check=True, stderr=subprocess.DEVNULL)
    Image.open(page.parent / "page.png").convert("RGB").quantize(64).save(page.parent / "64.png")
    return (page.parent / "64.png").read_bytes()


def server() -> bytes:
    """The page of `serve`, which gets what the server has just answered with the demo model."""
    at, question = "http://127.0.0.1:8099/v1/", "What is a list comprehension?"
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with subprocess.Popen([PROGRAM, "serve", "--port", "8099"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # "serving ...": from now on
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        said = urlopen(Request(f"{at}chat/completions", body, kind)).read().decode()
        models = urlopen(f"{at}models").read().decode()
        process.terminate()
    told = f"path.endsWith('models') ? {json.dumps(models)} : {json.dumps(said)}"
    page = (files("pyllama_mtp") / "serve" / "page.html").read_text("utf-8")
    page = page.replace('"use strict";', f"window.fetch = async path => new Response({told});")
    page += f"<script>said.value = {json.dumps(question)}; form.requestSubmit();</script>"
    with TemporaryDirectory() as folder:
        (copy := Path(folder, "page.html")).write_text(page, "utf-8")
        return screenshot(copy, 520)


def report() -> bytes:
    """The page of `report`, of committed samples."""
    with TemporaryDirectory() as folder:
        Path(folder, "golden.jsonl").write_bytes((RESULTS / "golden.jsonl").read_bytes())
        subprocess.run([PROGRAM, "report", "golden.jsonl", "-o", "page"], cwd=folder, check=True)
        return screenshot(Path(folder, "page", "index.html"), 860)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(__doc__)
    for draw in (speed, context, terminal, server, report):
        name = f"{draw.__name__}.{'png' if draw in (server, report) else 'svg'}"
        if name in sys.argv or not sys.argv[1:]:
            (ROOT / "docs" / "pictures" / name).write_bytes(draw())
