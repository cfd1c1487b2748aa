"""The handbook (README and docs/*.md) is short, true and whole: sentences, links, paths, commands and quoted messages.

docs/log/ is the log: how things came to be. Its links and commands are held too, its sentences are not.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from alpha import cli, config, errors
from alpha.bench.docs import REGION, claims
from alpha.tomlfile import parse_toml
from alpha.train.interrupt import EXIT

ROOT = Path(__file__).parents[2]
HANDBOOK = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*HANDBOOK, *sorted((ROOT / "docs" / "log").glob("*.md"))]
MOST_WORDS = 25
"""Words of a sentence of the handbook."""

FENCE = re.compile(r"^```.*?^```", re.S | re.M)
SPAN = re.compile(r"(`+)(.+?)\1", re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
END = re.compile(r"(?<=[.!?])[)*_\"']*\s+(?=[^a-z\s])")
GENERATED = re.compile(r"^(?:baselines/generated|\.alpha|runs)(?:/|$)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> list[str]:
    """Paragraphs and list items, without what is no sentence: regions, fenced and indented code, tables, headings, images."""
    text = FENCE.sub("\n", REGION.sub("\n", text))
    parts: list[list[str]] = [[]]
    listed = False
    for line in text.splitlines():
        bare = line.strip()
        item = re.match(r"(?:[-*]|\d+\.) ", bare)
        if not bare or bare.startswith(("|", "#", "<!--", "![")):
            parts.append([])
            listed = listed and not bare  # an item may go on behind an empty line
        elif item:
            parts.append([bare[item.end():]])
            listed = True
        elif line.startswith("    ") and not parts[-1] and not listed:
            continue  # indented code
        else:
            if not line.startswith(" ") and not parts[-1]:
                listed = False
            parts[-1].append(bare)
    return [" ".join(p) for p in parts if p]


def words(sentence: str) -> int:
    """A code span and a link's target count as one word and none; bare punctuation is no word."""
    plain = LINK.sub(r"\1", SPAN.sub(" code ", sentence))
    return sum(bool(re.search(r"\w", w)) for w in plain.split())


def sentences(text: str) -> Iterator[str]:
    for paragraph in prose(text):
        yield from END.split(paragraph)


@pytest.mark.parametrize("page", HANDBOOK, ids=name)
def test_sentences_are_short(page: Path) -> None:
    long = [f"{words(s)} words: {s}" for s in sentences(page.read_text(encoding="utf-8")) if words(s) > MOST_WORDS]
    assert not long, f"{name(page)}: a sentence has at most {MOST_WORDS} words\n" + "\n".join(long)


def test_a_long_sentence_is_seen() -> None:
    long = "It has one word " + "and more " * 11
    assert [words(s) for s in sentences(f"# T\n\nShort one. {long}.\n\n    {long}\n\n- {long}\n  and `a b c` more.\n")] == [2, 26, 29]
    assert not list(sentences(f"| {long} |\n\n```\n{long}\n```\n\n## {long}\n"))


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        found.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for _, target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        aim = page if not file else (page.parent / file).resolve()
        if not aim.exists() or (anchor and aim.suffix == ".md" and anchor not in anchors(aim)):
            broken.append(target)
    assert not broken, f"{name(page)} links to what is not there: {broken}"


TOP = ("alpha", "kernels", "suites", "baselines", "configs", "docs", "reports", "examples")


def paths(page: Path) -> Iterator[str]:
    """Paths in code spans: of the repository, or of a page beside this one. Patterns and names to fill in are left out."""
    for _, span in SPAN.findall(REGION.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))):
        if re.fullmatch(r"[\w.~/-]+", span) and ((span.split("/")[0] in TOP and "/" in span) or span.endswith(".md")):
            yield span


@pytest.mark.parametrize("page", HANDBOOK, ids=name)
def test_paths_are_there(page: Path) -> None:
    made = set(re.findall(rf"^(?:#|//) ((?:{'|'.join(TOP)})/\S+)$", page.read_text(encoding="utf-8"), re.M))  # files of a walkthrough
    missing = [p for p in paths(page) if p not in made and not any((base / p).exists() for base in (ROOT, page.parent))]
    assert not missing, f"{name(page)} names what is not there: {missing}"


# -- commands ------------------------------------------------------------------------------------------------------------------


def _parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


@cache
def top() -> argparse.ArgumentParser:
    return cli.parser()


def wrong(command: str) -> str:
    """Why `alpha ...` is no command: '' where it is one. Options must exist; places to fill in (ID, RUN) and '...' are let be."""
    text = re.split(r"\s{2,}|\s[#;|>]\s", command.strip())[0]
    try:
        given = shlex.split(text)[1:]
    except ValueError as error:
        return str(error)
    parser = top()
    while given and _parsers(parser):
        if given[0] in ("...", "") or (len(given) == 1 and re.fullmatch(r"\W+", given[0])):
            return ""
        if given[0].startswith("-"):
            break
        word = given.pop(0).rstrip(".,:;")
        if word not in _parsers(parser):
            return f"no command {word!r}; there are {', '.join(sorted(_parsers(parser)))}"
        parser = _parsers(parser)[word]
    known = {o for action in parser._actions for o in action.option_strings}
    unknown = [w for w in given if w.startswith("--") and w.strip("[].,:").split("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown else ""


def commands(text: str) -> Iterator[str]:
    """`alpha ...` in code spans, and in the lines of code blocks. A line may name several after each other: `list | run`."""
    for _, span in SPAN.findall(FENCE.sub("", text)):
        one = " ".join(span.split())
        if re.match(r"(?:\.venv/bin/)?alpha [a-z-]", one):
            yield one
    for block in [*FENCE.findall(text), *re.findall(r"(?:^    .*\n)+", text, re.M)]:
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?alpha [a-z-]", line):
                yield line.strip().removeprefix("$ ")


def alternatives(command: str) -> list[str]:
    """`alpha gate list | run [ID]` names two commands of the group `gate`."""
    text = re.split(r"\s{2,}|\s#\s", command.strip())[0].removeprefix(".venv/bin/")
    first, *others = re.split(r"\s\|\s", text)
    group = first.split()[1]
    if group not in ("gate", "kernels"):
        return [first]
    return [first, *(f"alpha {group} {other}" for other in others)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    found = [f"{c}: {why}" for line in commands(page.read_text(encoding="utf-8")) for c in alternatives(line) if (why := wrong(c))]
    assert not found, f"{name(page)}:\n" + "\n".join(found)


def test_a_wrong_command_is_seen() -> None:
    assert "no command 'walk'" in wrong("alpha walk runs/demo") and "no option --stael" in wrong("alpha gate run --stael")
    assert "no command 'cheek'" in wrong("alpha gate cheek") and not wrong("alpha gate run ID --stale --budget 300")
    assert alternatives("alpha gate list | run ID") == ["alpha gate list", "alpha gate run ID"]


def advice() -> Iterator[tuple[str, str]]:
    """(file: line, command) of each `alpha ...` in backticks within a text of the package that is no docstring."""
    for path in sorted((ROOT / "alpha").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        output = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "VALUE" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in output:
                text = node.value
            else:
                continue
            for command in re.findall(r"`(alpha [^`]+)`", text):
                yield f"{name(path)}:{node.lineno}", command


def test_commands_in_errors_exist() -> None:
    found = list(advice())
    assert len(found) > 20  # there are many; else this looks in the wrong place
    bad = [f"{place}: {c}: {why}" for place, c in found for one in alternatives(c) if (why := wrong(one))]
    assert not bad, "advice that nobody can follow:\n" + "\n".join(bad)


# -- messages ------------------------------------------------------------------------------------------------------------------


def messages() -> dict[str, set[str]]:
    """First argument of every raised or made error of the package, a line each, `...` for what is filled in -> names of the classes."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "alpha").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            for text in ast.walk(node.args[0]):
                if isinstance(text, ast.JoinedStr):
                    output = "".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in text.values)
                elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                    output = text.value
                else:
                    continue
                for line in output.split("\n"):
                    found.setdefault(re.sub(r"\.{3,}", "...", line), set()).add(ast.unparse(node.func))
    return found


def test_troubleshooting_quotes_what_stands() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### (.+)\n\n\*Exit code (\d)\.\*", text, re.M)
    assert len(quoted) == len(re.findall(r"^### ", text, re.M)) >= 10
    stand = messages()
    for message, code in quoted:
        assert message in stand, f"no error says: {message}"
        codes = {getattr(errors, name).exit_code for name in stand[message] if hasattr(errors, name)}
        assert codes == {int(code)}, f"{message}: exit code {code} in docs, {codes} in the code"


def test_troubleshooting_has_every_exit_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    stated = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", text, re.M) for n in row.split(",")}
    classes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.AlphaError)}
    assert stated == {0, *classes, *(EXIT + s for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}


def test_config_keys_exist() -> None:
    """Keys of run files that the handbook names in code spans, and `--set` in its commands."""
    known = {f"{name}.{key}" for name, cls in config._sections().items() for key in cls.__dataclass_fields__}
    tops = "|".join(config._sections())
    for page in HANDBOOK:
        text = page.read_text(encoding="utf-8")
        named = re.findall(rf"`((?:{tops})\.[a-z_]+)(?: = [^`]*)?`", text) + re.findall(r"--set[ =]([a-z]+\.[a-z_]+)=", text)
        named = [n for n in named if not (ROOT / n.replace(".", "/")).exists() and n not in ("config.toml", "run.toml", "section.key")]
        wrong_keys = [n for n in named if n not in known and not n.endswith((".py", ".md", ".toml"))]
        assert not wrong_keys, f"{name(page)}: {wrong_keys}"


# -- glossary, README, licences ------------------------------------------------------------------------------------------------


def test_glossary_is_short_and_used() -> None:
    rows = re.findall(r"^\| ([\w ]+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)[1:]
    assert 20 <= len(rows) <= 40 and [w for w, _ in rows] == sorted((w for w, _ in rows), key=str.lower)
    package = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "alpha").rglob("*.py")).lower()
    unused = [w for w, _ in rows if not re.search(rf"\b{re.escape(w.lower())}", package)]
    assert not unused, f"words that nobody uses: {unused}"


def test_readme_begins_with_what_it_is_the_number_and_the_picture() -> None:
    top = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:10])
    assert top.startswith("# Alpha\n\nAlpha trains") and "<!-- bench:headline -->" in top and re.search(r"!\[.+\]\(docs/images/\S+\)", top)


def test_speeds_stand_in_regions_alone() -> None:
    for page in ("README.md", "docs/benchmarks.md", "docs/kernels.md", "docs/architecture.md"):
        assert not claims((ROOT / page).read_text(encoding="utf-8")), page


def test_every_dependency_has_a_licence() -> None:
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    missing = [d for d in wanted if not re.search(rf"^\|[^|]*\b{re.escape(re.split('[^A-Za-z0-9-]', d)[0])}\b", page, re.M)]
    assert not missing, f"docs/licences.md lacks {missing}"
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
