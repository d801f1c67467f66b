"""The site builds without a warning and without a network, and its code runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if RUN.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marked_code_of_a_page_runs(page):
    text = page.read_text()
    blocks = RUN.findall(text)
    assert len(blocks) == text.count("<!-- run -->")
    names = {"__name__": "page"}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, page, "exec"), names)


def test_pages_hold_what_was_measured():
    command = [sys.executable, ROOT / "benchmarks" / "plot.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_site_builds_strictly_and_fetches_nothing(tmp_path):
    if importlib.util.find_spec("material") is None or not importlib.util.find_spec("mkdocstrings"):
        pytest.skip("mkdocs-material and mkdocstrings are not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    options = {"cwd": ROOT, "env": os.environ | {"NO_MKDOCS_2_WARNING": "1"}}
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*=\"?(?:https?:)?//[^>]*>", text)
        assert "--8<--" not in text
    assert "A query without a visible key" in (tmp_path / "api" / "index.html").read_text()
    assert "bottom-right aligned" in (tmp_path / "semantics" / "index.html").read_text()
    assert (tmp_path / "speedup.png").exists()
    assert (tmp_path / "results" / "softmax.csv").exists()
