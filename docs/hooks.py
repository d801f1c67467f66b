"""The home page is README.md, whose links start at the root of the repository."""


def on_page_markdown(markdown, page, **others):
    return markdown.replace("](docs/", "](") if page.file.src_uri == "index.md" else markdown
