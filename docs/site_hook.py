"""For mkdocs: pages that lie beside docs/ are part of the site, and links lead to where the pages are there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

BESIDE = {
    "README.md": "index.md",
    "protocol.md": "protocol.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages beside docs/, and their names in the site."""

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - a test reads this file without mkdocs

    root = Path(config.config_file_path).parent
    for source, name in BESIDE.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=moved(text, "", known(files))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Change the links of a page of docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return markdown if page.file.src_uri in BESIDE.values() else moved(markdown, folder, known(files))


def known(files: Any) -> set[str]:
    """The names of all files in the site."""
    return {one.src_uri for one in files} | set(BESIDE.values())


def moved(text: str, folder: str, names: set[str]) -> str:
    """The text with its links as they are in the site. A link to a file that is not there becomes plain text.

    `folder`: of the page, from the root of the project.
    """

    place = folder.removeprefix("docs").strip("/") or "."  # of the page in the site

    def move(found: re.Match[str]) -> str:
        label, target, anchor = found[1], posixpath.normpath(posixpath.join(folder, found[2])), found[3] or ""
        name = BESIDE.get(target, target.removeprefix("docs/"))
        return f"[{label}]({posixpath.relpath(name, place)}{anchor})" if name in names else label

    return LINK.sub(move, text)
