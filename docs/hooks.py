"""Makes pages of what lies outside of docs/: README, DESIGN, CONTRIBUTING, docstrings, CSV files.

Pictures of the results are drawn for the site.

Pages link to those files by their paths in the repository, so that links work without the site too.
Here such a link becomes one to the page that has the text.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from pictures import PICTURES  # noqa: E402

RESULTS = "benchmarks/results"
HEADINGS = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]*)(#[^)]*)?\)")
PICTURE = re.compile(r"^(!\[[^]]*\]\(([^)]+)\))$", re.MULTILINE)
OBJECT = re.compile(r"^\* \[`([\w.]+)`\]\(([^)]+)\).*$", re.MULTILINE)


def _part(text, name):
    """What DESIGN.md has between two markers."""
    return text.split(f"[start:{name}] -->\n")[1].split(f"<!-- --8<-- [end:{name}]")[0]


DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
# A page of the site -> its text, and the file of the repository that has it.
PAGES = {
    "index.md": ((ROOT / "README.md").read_text(encoding="utf-8"), "README.md"),
    "semantics.md": ("# What is computed\n\n" + _part(DESIGN, "semantics"), "DESIGN.md"),
    "design.md": ("# Design\n\n" + _part(DESIGN, "design"), "DESIGN.md"),
    "contributing.md": (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "CONTRIBUTING.md",
    ),
}
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SOURCES = {posixpath.normpath(f"docs/{path}"): name for name, path in reversed(OBJECT.findall(API))}


def on_files(files, config):
    for page, (text, _) in PAGES.items():
        files.append(File.generated(config, page, content=text))
    for name, svg in PICTURES.items():
        if found := files.get_file_from_path(name):  # drawn before, or that of README
            files.remove(found)
        files.append(File.generated(config, name, content=svg()))
    for path in sorted((ROOT / RESULTS).glob("*.csv")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **others):
    here = page.file.src_uri
    if here == "api.md":
        return OBJECT.sub(r"::: \1\n", markdown)
    source = PAGES[here][1] if here in PAGES else f"docs/{here}"
    folder = posixpath.dirname(source)

    def on_site(found):
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        target, anchor = _page_of(path, found[2] or "")
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return PICTURE.sub(
        r"[\1](\2)", LINK.sub(on_site, markdown)
    )  # one that is pressed fills the screen


def _page_of(path, anchor):
    """The page of a file of the repository, relative to docs/, and the anchor there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/"), anchor
    if path.startswith(f"{RESULTS}/"):
        return path.removeprefix("benchmarks/"), anchor
    if path in SOURCES:
        return "api.md", f"#{SOURCES[path]}"
    slug = slugify(case="lower")
    for page, (text, source) in PAGES.items():
        anchors = {f"#{slug(heading, '-')}" for heading in HEADINGS.findall(text)}
        if source == path and (not anchor or anchor in anchors):
            return page, anchor
    raise ValueError(f"no page of the site has {path}{anchor}")
