"""The site builds without a warning and without a network; code and links of pages work."""

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from megasoftmax.build import library
from megasoftmax.limits import kernel_limits

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
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


def test_blocks_of_the_readme_run_as_printed(tmp_path, monkeypatch):
    """One after the other, with the names of those before. "gpt2" is a folder with a tiny model."""
    pytest.importorskip("megatron", reason="needs megatron-core")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    ).save_pretrained(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        if block.startswith(">>> "):
            example = doctest.DocTestParser().get_doctest(block, names, "README", None, line)
            if library.status().reason == "torch sees no CUDA GPU":  # as printed
                assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
        else:
            exec(compile("\n" * line + block, README, "exec"), names)
    assert names["model"].config._attn_implementation == "megasoftmax"
    assert names["output"].shape == names["query"].shape


def test_ci_runs_the_command_of_the_readme():
    """Both of its parts, and those who contribute read of the second."""
    command = re.search(r"^(pip install '\.\[test\]') && (pytest .*)$", README.read_text(), re.M)
    install, tests = command.groups()
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"\n{install}\n" in ci
    assert f" {tests}\n" in ci
    assert f"\n{tests} " in (ROOT / "CONTRIBUTING.md").read_text()


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
    assert (tmp_path / "results" / "softmax.csv").exists()
    texts = {picture.name: picture.read_text() for picture in tmp_path.glob("*.svg")}
    assert texts.keys() == pictures().PICTURES.keys()
    for text in texts.values():
        _check_colours(text)
    _check_api(tmp_path / "api" / "index.html")


def pictures():
    """The module of benchmarks that draws them from results."""
    return importlib.import_module("pictures")


def _check_colours(picture):
    """No background, and text in a colour that follows the theme."""
    assert "prefers-color-scheme: dark" in picture
    assert "currentColor" in picture
    assert not re.search(r"fill: #(000000|ffffff)", picture)


def _check_api(page):
    """Whole signatures, and one row for what a function returns."""
    softmax = page.read_text().split('id="megasoftmax.softmax"')[1]
    softmax = softmax.split('id="megasoftmax.softmax_topk"')[0]
    signature = re.sub(r"<[^>]*>", "", softmax[: softmax.index("Softmax of attention scores")])
    parts = ("scores: Tensor", "scale: float = 1.0", "dim: int = -1", "-&gt; Tensor | tuple")
    assert all(part in signature for part in parts)
    assert "= ..." not in signature
    returned = softmax.split("Returns:")[1].split("</table>")[0]
    assert returned.count("<tr") == 2  # the head and one row


def _links(page):
    """(file, anchor) of each link of a page to another file of the repository."""
    block_or_badge = re.compile(r"^```.*?^```$|^\[!\[[^\n]*$", re.DOTALL | re.MULTILINE)
    text = block_or_badge.sub("", page.read_text())
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
        yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.name
)
def test_links_lead_to_the_text_in_the_repository_too(page):
    """To a file that is there, and to a heading of it: no page of the site alone is named."""
    for target, anchor in _links(page):
        is_drawn = target.parent == ROOT / "docs" and target.name in pictures().PICTURES
        assert target.is_file() or is_drawn, target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
            assert anchor in anchors, f"{target.name}#{anchor}"


def test_the_picture_of_row_regimes_has_a_colour_for_each():
    limits = kernel_limits()
    for regime in (*limits.forward, *limits.backward):
        assert pictures().color_of(regime.name)


def test_picture_of_the_readme_has_the_colours_of_its_page():
    _check_colours((ROOT / "docs" / "headline.svg").read_text())
