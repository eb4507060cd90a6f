"""Hooks of MkDocs for the site: navigation by patterns, the API reference, links into the repository, checks.

Whatever is wrong is a warning, on which `mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import griffe
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import RunTime, defined, parameters, public_names
from families import FAMILIES, Family
from notebooks import as_markdown

ROOT = Path(__file__).parents[2]
log = get_plugin_logger("distdl_jax")

LAYERS = re.compile(r"^```layers\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONE_DIMENSION = re.compile(r" (?:1-D|over 1 feature dimension)(?=[ ,.]|$)")
SYNONYMS = re.compile(r"^<!-- search: (.*?) -->$", re.MULTILINE)
SHAPE = re.compile(r"(?<=\d) x (?=\d)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let code spans that are public names link to the reference, and pages to where they are edited."""
    config.edit_uri_template = f"{config.extra['repository']}/edit/main/docs/{{path}}"
    config.markdown_extensions.append(NameLinks())
    read_package.cache_clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference and of notebooks, and expand the patterns in the navigation."""
    package, found = read_package(), families()
    files.append(File.generated(config, "api/index.md", content=overview(found, package)))
    for family, names in found.items():
        files.append(File.generated(config, f"api/{family.file}.md", content=api_page(family, names, package)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        address = f"{config.extra['repository']}/blob/main/docs/{file.src_uri}"
        page = file.src_uri.removesuffix("ipynb") + "md"
        files.append(File.generated(config, page, content=as_markdown(file.content_string, address)))
    pages = [file.src_uri for file in files.documentation_pages()]
    named = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))
    config.nav = expanded(config.nav, pages, named)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **kwargs: Any) -> str:
    """Take a page's synonyms, list its layers, lead links to the repository, and cut infos of code blocks."""
    for words in SYNONYMS.findall(markdown):
        page.meta.setdefault("tags", []).extend(word.strip() for word in words.lower().split(","))
    markdown = LAYERS.sub(lambda block: listed(block[1].split()), markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        if not link["target"]:
            return re.sub("(?<=^```)(\\w+) .*", r"\1", link[0])
        path, _, anchor = link["target"].partition("#")
        if path.endswith(".ipynb"):
            return link[0].replace(".ipynb", ".md")
        path = posixpath.normpath(posixpath.join(folder, path))
        if not path.startswith("../"):
            return link[0]
        path = path.removeprefix("../")
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there.", page.file.src_uri, link["target"])
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{path}{anchor and '#'}{anchor})"

    return re.sub(r"^```.*?^```|`[^`\n]+`|\]\((?!\w+:)(?P<target>[^)\s]+)\)", replaced, markdown, flags=re.M | re.S)


def on_page_content(html: str, page: Page, **kwargs: Any) -> str:
    """Refuse images without alternative text, and keep shapes such as 4 x 1 x 1 in one line."""
    Images(page).feed(html)
    return re.sub(r"<t[dh].*?</t[dh]>", lambda cell: SHAPE.sub("\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}", cell[0]), html)


class Images(HTMLParser):
    """Parser of a page that checks its images."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Warn of an image without alternative text."""
        found = dict(attributes)
        if tag == "img" and not (found.get("alt") or "").strip():
            log.warning("%s: the image %s has no alternative text.", self.page.file.src_uri, found.get("src"))


def expanded(nav: Any, pages: list[str], named: set[str]) -> Any:
    """Return a part of the navigation with the pages that its patterns match, but for those named elsewhere.

    A section without pages is left out.
    """
    if isinstance(nav, dict):
        parts = {title: expanded(part, pages, named) for title, part in nav.items()}
        return {title: part for title, part in parts.items() if part}
    if isinstance(nav, list):
        found: list[Any] = []
        for part in nav:
            if isinstance(part, str) and "*" in part:
                matching = [page for page in pages if fnmatchcase(page, part) and page.count("/") == part.count("/")]
                found += [page for page in matching if page not in named]
                named.update(matching)
            elif part := expanded(part, pages, named):
                found.append(part)
        return found
    return nav


@cache
def read_package() -> griffe.Module:
    """Return the package as the reference shows it, after a look at its public names."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions("dataclasses", RunTime))
    package = loader.load("distdl_jax")
    assert isinstance(package, griffe.Module)
    loader.resolve_aliases(implicit=False, external=False)
    for name, signature in public_names().items():
        for problem in problems(defined(package, name), signature):
            log.warning("dj.%s %s.", name, problem)
    return package


def problems(value: Any, signature: str) -> Iterator[str]:
    """Say what a public name lacks: docstrings, its own or a method's, and the parameters that are recorded."""
    if not value.docstring:
        yield "has no docstring"
    for method in value.members.values() if value.is_class else ():
        lines = [each.members[method.name] for each in (value, *value.mro()) if method.name in each.members]
        if method.is_function and is_shown(method.name) and not any(each.docstring for each in lines):
            yield f"has a method without a docstring: {method.name}"
    shown = [each.name for each in value.parameters if each.name != "self"]
    if shown and signature != "()" and shown != parameters(signature):
        yield f"has the parameters {', '.join(shown)} in its source, and {signature} on record"


def is_shown(method: str) -> bool:
    """Say whether the reference has a method of that name."""
    return method[0] != "_" or method == "__call__"


def families() -> dict[Family, list[str]]:
    """Return the public names of each page, in the order of its patterns."""
    left, found = list(public_names()), {}
    for family in FAMILIES:
        found[family] = [
            name for pattern in family.patterns.split() for name in list(left) if take(left, name, pattern)
        ]
    if left:
        log.warning("No page of tools/site/families.py has a pattern for %s.", ", ".join(left))
    return found


def take(left: list[str], name: str, pattern: str) -> bool:
    """Take a name from those that are left if it has the pattern; `*` is no dot."""
    matches = fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
    if matches:
        left.remove(name)
    return matches


def overview(found: dict[Family, list[str]], package: griffe.Module) -> str:
    """Return the first page of the reference: all names, and the first sentence on each."""
    parts = ["# API reference", "All public names, with `import distdl_jax as dj`."]
    for family, names in found.items():
        rows = [f"| `dj.{name}` | {summary(defined(package, name))} |" for name in names]
        parts += [f"## [{family.title}]({family.file}.md)", "\n".join(["| name | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def summary(value: griffe.Object) -> str:
    """Return the first sentence of a docstring."""
    text = value.docstring.value if value.docstring else ""
    return re.split(r"(?<!\.)[.:](?:\s|$)", text.split("\n\n")[0].replace("\n", " "))[0]


def listed(patterns: list[str]) -> str:
    """Return a list of the public names with one of the patterns; `?d` stands for 1d, 2d, ... in one line."""
    lines = []
    for pattern in patterns:
        left = list(public_names())
        names = [name for name in list(left) if take(left, name, pattern)]
        if not names:
            log.warning("A list of layers has the pattern %s, and no public name fits it.", pattern)
        for name in names[:1] if pattern.endswith("?d") else names:
            to = f" to `{names[-1][-2:]}`" if pattern.endswith("?d") else ""
            lines.append(f"- `{name}`{to}: {ONE_DIMENSION.sub('', summary(defined(read_package(), name)))}")
    return "\n".join(lines)


def api_page(family: Family, names: list[str], package: griffe.Module) -> str:
    """Return a page of the reference in Markdown."""
    parts = [f"---\nsearch:\n  boost: {family.boost}\n---", f"# {family.title}", family.about]
    shown: dict[str, str] = {}
    for name in names:
        there, path = f"distdl_jax.{name}", defined(package, name).path
        if path in shown:
            parts.append(f"## dj.{name} {{#{there}}}\n\nA second name of `dj.{shown[path]}`.")
            continue
        shown[path] = name
        if package[name].is_module:  # it hides the function of its name
            parts.append(f"[](){{#{there}}}")
            there = path
        elif not package[name].docstring:
            log.warning("dj.%s is shown without a docstring.", name)
        options = f"    options:\n      heading: dj.{name}\n      toc_label: {name.rpartition('.')[2]}"
        parts.append(f"::: {there}\n{options}")
    return "\n\n".join([*parts, *inherited(names, package)]) + "\n"


def inherited(names: list[str], package: griffe.Module) -> list[str]:
    """Return a section on the methods that the classes of a page have from base classes."""
    classes = [cls for cls in (defined(package, name) for name in names) if cls.is_class]
    found: dict[str, tuple[str, list[str]]] = {}
    for cls in classes:
        members = [member for each in (cls, *cls.mro()) for member in each.members.values()]
        nearest = {member.name: member for member in reversed(members) if is_shown(member.name)}
        for method in nearest.values():
            if method.is_function and method.docstring and method.parent != cls:
                text = method.docstring.value.split("\n\n")[0].replace("\n", " ")
                takes = [each.name for each in method.parameters if each.name != "self"]
                found.setdefault(f"{method.name}({', '.join(takes)})", (text, []))[1].append(cls.name)
    if not found:
        return []
    rows = [
        f"| `{call}` | {text} {'' if len(having) == len(classes) else '*' + ', '.join(having) + '*'} |"
        for call, (text, having) in sorted(found.items())
    ]
    about = "Methods that the classes have from their bases. In italics: which classes, where it is not all of them."
    return ["## Inherited methods", about, "\n".join(["| method | |", "|---|---|", *rows])]


class NameLinks(Extension):
    """Code spans that are public names as links to the reference."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Look at code spans once all else has been parsed; `<F x, y>` is text, and no HTML."""
        md.inlinePatterns.deregister("html")
        md.treeprocessors.register(NameLinker(md), "public_names", 0)


class NameLinker(Treeprocessor):
    """Tree processor that puts references around code spans."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(md)
        names = list(public_names())
        self.targets = {f"{start}{name}": name for name in names for start in ("dj.", "distdl_jax.")}
        for name in names:
            module, _, last = name.rpartition(".")
            if module or last[0].isupper():
                self.targets[name] = name
            if last[0].isupper():
                self.targets.setdefault(last, name)

    def run(self, root: Element) -> None:
        """Put a reference around each code span that is a name, but not in links, headings and code blocks."""
        for parent in list(root):
            if parent.tag in ("a", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "autoref"):
                continue
            if parent.tag == "code" and (name := self.targets.get("".join(parent.itertext()))):
                code = Element("code")
                code.text, parent.text = parent.text, None
                parent.tag = "autoref"
                parent.set("identifier", f"distdl_jax.{name}")
                parent.append(code)
            else:
                self.run(parent)
