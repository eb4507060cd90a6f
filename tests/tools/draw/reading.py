"""What a picture shows, read from its SVG."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any, NamedTuple


class Area(NamedTuple):
    x: float
    y: float
    w: float
    h: float


SVG = "{http://www.w3.org/2000/svg}"
MOVES = re.compile(r"(\d+) to (\d+): (?:[\d,]+ messages, )?([\d,]+) bytes")
BUNDLE = re.compile(r"(\d+) messages?, ([\d,]+) bytes")


def parsed(svg: str) -> ElementTree.Element:
    """Return the root of a well-formed document that a reader who doesn't see it is told of."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert root[0].tag == f"{SVG}title" and root[0].text
    assert root[1].tag == f"{SVG}desc"
    assert len(svg) < 300_000
    return root


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter(f"{SVG}g") if element.get("class") == name]


def title_of(element: ElementTree.Element) -> str:
    return next((title.text or "" for title in element.iter(f"{SVG}title")), "")


def drawn_bytes(root: ElementTree.Element) -> Counter[tuple[int, int]]:
    """Return the bytes from worker to worker, from arrows, strips and squares of a matrix.

    Halos between slabs, whose arrows stand for several messages, are under (-1, -1).
    """
    found: Counter[tuple[int, int]] = Counter()
    for element in [*of_class(root, "arrow"), *root.iter(f"{SVG}rect")]:
        about = title_of(element)
        if match := MOVES.match(about):
            is_square = element.tag == f"{SVG}rect" and "messages" in about
            if is_square or element.tag == f"{SVG}g":
                found[int(match[1]), int(match[2])] += number(match[3])
        elif match := BUNDLE.match(about):
            found[-1, -1] += number(match[2])
    return found


def areas(root: ElementTree.Element) -> tuple[dict[int, Area], dict[tuple[int, int], Area]]:
    """Return where the face of each worker's block is, the last one, and each hatched box, by sender and receiver."""
    blocks, strips = {}, {}
    for element in root.iter():
        at = [float(element.get(name, "nan")) for name in ("x", "y", "width", "height")]
        about = next((child.text or "" for child in element if child.tag == f"{SVG}title"), "")
        if element.tag == f"{SVG}rect" and (match := re.match(r"worker (\d+): ", about)):
            blocks[int(match[1])] = Area(*at)
        elif element.tag == f"{SVG}rect" and (match := re.match(r"(\d+) to (\d+)", about)):
            strips[int(match[1]), int(match[2])] = Area(*at)
    return blocks, strips


def number(text: str) -> int:
    return int(text.replace(",", ""))


def planned_bytes(operations: dict[int, Any]) -> Counter[tuple[int, int]]:
    """Return the bytes from worker to worker, from what each worker does."""
    found: Counter[tuple[int, int]] = Counter()
    for worker, some in operations.items():
        for operation in some:
            if operation.is_message and operation.dest is not None:
                found[worker, operation.dest] += operation.count * operation.itemsize
    return found
