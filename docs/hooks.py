"""The site takes README.md as its home page, and the CSV files of benchmarks/results as files."""

from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path("benchmarks") / "results"
HOME_LINKS = {
    "docs/": "",
    "DESIGN.md#semantics": "semantics.md#semantics",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
}


def on_files(files, config):
    for path in sorted((Path(config.config_file_path).parent / RESULTS).glob("*.csv")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **others):
    if page.file.src_uri == "index.md":  # its links start at the root of the repository
        for found, wanted in HOME_LINKS.items():
            markdown = markdown.replace(f"]({found}", f"]({wanted}")
    return markdown.replace(f"](../{RESULTS}/", "](results/")
