"""What stands around the code: workflows call targets of the Makefile, pinned to hashes; the files that a public repository needs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_and_pinned_actions(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = re.findall(r"^\s+- run: (.+)$", text, re.MULTILINE)
    called = [re.fullmatch(r"make ([a-z-]+)( VERSIONS=\$\{\{ matrix\.versions \}\})?", line) for line in ran]
    assert ran and all(match and match[1] in targets for match in called), ran
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used
    assert re.search(r"^permissions:", text, re.MULTILINE)


def test_the_versions_of_the_matrix_are_those_of_the_makefile() -> None:
    tested = set(re.findall(r'versions: \[?"(\w+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    assert tested == set(re.findall(r"^PINS_(\w+) :=", (ROOT / "Makefile").read_text(), re.MULTILINE)) == {"pinned", "oldest", "newest"}


def test_the_oldest_versions_are_those_that_the_package_allows() -> None:
    allowed = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)\.\*$", (ROOT / ".github" / "oldest.txt").read_text(), re.MULTILINE))
    oldest |= {"torch": re.findall(r"^TORCH_oldest \?= torch==([\d.]+)\.\*$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]}
    assert len(oldest) > 5 and {name: allowed[name] for name in oldest} == {
        name: version if "." in version else f"{version}.0" for name, version in oldest.items()
    }


def test_a_reader_finds_how_to_report_and_to_cite() -> None:
    for name in ("SECURITY.md", "CITATION.cff", "CONTRIBUTING.md", ".pre-commit-config.yaml", ".github/pull_request_template.md"):
        assert (ROOT / name).stat().st_size > 100, name
    assert "@" not in (ROOT / "SECURITY.md").read_text(), "reports go through the platform"
