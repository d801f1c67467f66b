"""Makes pages of files outside of docs/: README, DESIGN, CONTRIBUTING, docstrings, CSV files.

Pictures of the results are drawn for the site, and the table of GPUs is filled.

Pages link to those files by their paths in the repository, so that links also work without the
site. Here such a link becomes one to the page that has the text.
"""

import posixpath
import re
import shutil
import sys
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from gpus import gpus_table  # noqa: E402
from pictures import PICTURES  # noqa: E402

RESULTS = "benchmarks/results"
NOTEBOOK = "examples/first_steps.ipynb"  # which the site has as a file
INSTALLED = tempfile.TemporaryDirectory()
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]*)(#[^)]*)?\)")
BADGES = re.compile(r"^\[!\[.*\n\n", re.MULTILINE)  # which their host has, and no site
PICTURE = re.compile(r"^(!\[[^]]*\]\(([^)]+)\))$", re.MULTILINE)
OBJECT = re.compile(r"^\* \[`([\w.]+)`\]\(([^)]+)\).*$", re.MULTILINE)

# A page of the site -> the file of the repository that it shows.
PAGES = {"index.md": "README.md", "design.md": "DESIGN.md", "contributing.md": "CONTRIBUTING.md"}
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SOURCES = {posixpath.normpath(f"docs/{path}"): name for name, path in reversed(OBJECT.findall(API))}


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config):
    """Docstrings are read from a copy of the package as it is when installed."""
    copy = Path(INSTALLED.name, "megasoftmax")
    for source, target in (("megasoftmax", copy), ("integrations", copy / "integrations")):
        shutil.copytree(
            ROOT / source, target, ignore=shutil.ignore_patterns("*.so"), dirs_exist_ok=True
        )
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [INSTALLED.name]
    return config


def on_files(files, config):
    for page, path in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for name, svg in PICTURES.items():
        if found := files.get_file_from_path(name):  # drawn before, or that of README
            files.remove(found)
        files.append(File.generated(config, name, content=svg()))
    for path in sorted((ROOT / RESULTS).glob("*.csv")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, NOTEBOOK, abs_src_path=str(ROOT / NOTEBOOK)))
    return files


def on_page_markdown(markdown, page, **others):
    here = page.file.src_uri
    markdown = BADGES.sub("", markdown)
    if here == "api.md":
        return OBJECT.sub(r"::: \1\n", markdown)
    if here == "gpus.md":
        markdown = markdown.replace("<!-- gpus -->", gpus_table())
    source = PAGES.get(here, f"docs/{here}")
    folder = posixpath.dirname(source)

    def on_site(found):
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        target, anchor = _page_of(path, found[2] or "")
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    # A picture is a link to itself: a click fills the screen with it.
    return PICTURE.sub(r"[\1](\2)", LINK.sub(on_site, markdown))


def _page_of(path, anchor):
    """The page of a file of the repository, relative to docs/, and the anchor there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/"), anchor
    if path.startswith(f"{RESULTS}/"):
        return path.removeprefix("benchmarks/"), anchor
    if path == NOTEBOOK:
        return path, anchor
    if path in SOURCES:
        return "api.md", f"#{SOURCES[path]}"
    for page, shown in PAGES.items():
        if shown == path:
            return page, anchor
    raise ValueError(f"no page of the site has {path}{anchor}")
