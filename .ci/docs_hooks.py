"""What `mkdocs build` needs beyond docs/: pages link to files of the repository, which become pages of the site.

A link is written as it works in the repository (`../ARCHITECTURE.md`, `../examples/trl_grpo.py`); here its target is
added to the site, a script as a page that shows it, and the link is turned to where that is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ALWAYS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of docs/ that a page links to."""
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    pages += [ROOT / name for name in ALWAYS]
    targets = {_target(page, link) for page in pages for _, link, _ in LINK.findall(page.read_text())}
    for name in sorted({*ALWAYS, *targets}):
        path = ROOT / name
        if name.startswith("docs/") or not path.is_file():
            continue
        if path.suffix == ".py":
            shown = f"# {name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, f"{name}.md", content=shown))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their places in the site."""
    uri = page.file.src_uri
    is_generated = not (ROOT / "docs" / uri).exists()
    source = ROOT / uri if is_generated else ROOT / "docs" / uri

    def turned(match: re.Match[str]) -> str:
        name = _target(source, match[2])
        place = name.removeprefix("docs/") if name.startswith("docs/") else name + ".md" * name.endswith(".py")
        return match[1] + os.path.relpath(place, PurePosixPath(uri).parent) + match[3]

    return LINK.sub(turned, markdown)


def _target(page: Path, link: str) -> str:
    """The path from the repository's root that a link of a page leads to."""
    return os.path.relpath(page.parent / link, ROOT)
