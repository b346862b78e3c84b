"""HTML and SVG by small functions: every text is escaped, since most of it comes from data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
"""What HTML may not hold: control characters, and halves of surrogate pairs, which file names can have."""
MAX_TEXT = 400
"""Characters of one text from the data that are shown."""

MAX_LINES = 20
"""Lines of a list that are shown."""

_EMPTY = frozenset({"img", "meta", "link", "br", "col"})


class Markup(str):
    """Text that is HTML already, and so is not escaped again."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escape a text for an element or an attribute."""
    return Markup(escape(_UNFIT.sub("\ufffd", str(value)), quote=True))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element: ``tag("p", "1 < 2", class_="note")`` is ``<p class="note">1 &lt; 2</p>``.

    Children are texts (escaped), :class:`Markup`, lists of both, or None for nothing. An attribute that is None or False is left
    out; a trailing ``_`` is dropped and others become ``-``.
    """
    shown = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Return children one behind the other."""
    return Markup("".join(_child(child) for child in children))


def data_text(value: object, name: str = "bdi") -> Markup:
    """Return a text that comes from the data: escaped, shortened, its direction its own."""
    shown = str(value)
    if len(shown) > MAX_TEXT:
        shown = f"{shown[:MAX_TEXT]}… ({len(shown):,} characters)"
    return tag(name, shown) if name == "bdi" else tag(name, shown, dir="auto")


def table(
    caption: str, headers: Iterable[object], rows: Iterable[Iterable[object]], *, numeric: Iterable[int] = ()
) -> Markup:
    """Return a table that a screen reader can walk: a caption, column headers, and the first cell of a row as its header."""
    right = set(numeric)

    def cell(column: int, value: object) -> Markup:
        kind = "num" if column in right else None
        return tag("td", value, class_=kind) if column else tag("th", value, scope="row", class_=kind)

    head = tag(
        "tr", [tag("th", header, scope="col", class_="num" if k in right else None) for k, header in enumerate(headers)]
    )
    body = [tag("tr", [cell(column, value) for column, value in enumerate(row)]) for row in rows]
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body))
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def card(title: str, facts: Mapping[str, object], lists: Mapping[str, Sequence[str]]) -> str:
    """Return a result as a notebook shows it: a title, a table of facts, and lists of lines where they are not empty."""
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", data_text(value))) for name, value in facts.items()]
    parts: list[object] = [tag("p", tag("strong", data_text(title))), tag("table", tag("tbody", rows))]
    for name, lines in lists.items():
        if lines:
            more = [f"and {len(lines) - MAX_LINES:,} more"] if len(lines) > MAX_LINES else []
            items = [*(data_text(line) for line in lines[:MAX_LINES]), *more]
            parts.append(
                tag(
                    "details", tag("summary", f"{name}: {len(lines):,}"), tag("ul", [tag("li", item) for item in items])
                )
            )
    return tag("div", parts)


def _attribute(key: str, value: object) -> str:
    name = key.removesuffix("_").replace("_", "-").replace("viewbox", "viewBox")
    return f" {name}" if value is True else f' {name}="{text(value)}"'


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return text(child)
    if isinstance(child, Iterable):
        return join(child)
    return text(child)
