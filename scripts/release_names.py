"""Whether a release is what it says: the tag names the version, and the repository is the one that the package names.

python scripts/release_names.py REF_TYPE REF_NAME OWNER/NAME
    REF_TYPE is `tag` or `branch`; the name of a branch says nothing about the version

A package whose URLs lead to another repository sends its users, and their reports of vulnerabilities, to strangers.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """The version of the workspace, which is that of the package."""
    found: str = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    return found


def problems(ref_type: str, ref_name: str, repository: str) -> list[str]:
    """What does not agree, each with what to do; none when a release may be made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [
        f"pyproject.toml: {name} is {url}, but this repository is {repository}: write its URL there and in CITATION.cff"
        for name, url in project["urls"].items()
        if not f"{url}/".startswith(f"https://github.com/{repository}/")
    ]
    if ref_type != "tag":
        return found
    if ref_name != f"v{version()}":
        found.append(f"the tag is {ref_name}, but Cargo.toml has the version {version()}: the tag must be v{version()}")
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version():
        found.append(f"CITATION.cff names the version {cited and cited[1]}, not {version()}")
    if not re.search(rf"^## {re.escape(version())}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no section for {version()}: rename the one for unreleased changes")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    told = problems(*sys.argv[1:])
    print("\n".join(told) or f"version {version()}, repository {sys.argv[3]}")
    sys.exit(1 if told else 0)
