"""The troubleshooting page quotes every message of the package, and no message that is gone.

A message is read from the source: what is given to an error, a warning, a log, an assertion of TensorFlow's
or a printing graph, and every other literal that reads as a sentence, because results and helpers compose
their messages of such. It is written with ``…`` where a value stands. The page quotes it if a code span has
its beginning, so long that it can be recognised.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "…"

RECOGNISABLE = 20
"""Characters of a message that a quotation needs at least, if it is not all of it."""

DISPLAY = {"__repr__", "__str__", "_repr_html_", "plot"}
"""Functions that print results: their literals are labels."""

INVARIANTS = {"AssertionError"}
"""Errors that say something about the package, not about its use."""


class Message(NamedTuple):
    text: str
    where: str


# Messages from the source


def literal(node: ast.AST) -> str | None:
    """The text of a string, of all its implicitly concatenated parts, with … for values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or VALUE for part in node.values)
    return None


def normalised(text: str) -> str:
    """One space for white space, one … for adjacent values, nothing before the first word."""
    return re.sub(rf"{VALUE}(\s*{VALUE})+", VALUE, " ".join(text.split())).lstrip(" ,:;")


def reads_as_sentence(text: str) -> bool:
    words = [word for word in text.split() if re.search(r"[^\W\d_]", word)]
    return len(words) >= 3 or (len(words) == 2 and text.endswith("."))


def dotted(node: ast.expr) -> str:
    """``tf.debugging.Assert`` as a string, empty for what is not a dotted name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def speaks(call: ast.Call) -> bool:
    """Whether a call tells the user what it is given, raised or not."""
    *owners, name = dotted(call.func).split(".")
    if re.search(r"(Error|Warning|Exception)$", name):
        return True
    owner = ".".join(owners)
    return (
        name == "warn"
        or (owner, name) == ("tf", "print")
        or owner == "tf.debugging"
        or re.search(r"log(ger|ging)?$", owner, re.IGNORECASE) is not None
    )


def is_abstract(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
        dotted(decorator).endswith("abstractmethod") for decorator in node.decorator_list
    )


def literals(
    node: ast.AST, spoken: bool = False, raised: bool = False
) -> Iterator[tuple[int, str]]:
    """Line and text of every literal that is spoken, or reads as a sentence, in a node."""
    text = literal(node)
    if text is not None and (spoken or reads_as_sentence(normalised(text))):
        yield getattr(node, "lineno", 0), text
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in DISPLAY:
        return
    if is_abstract(node):
        return
    if isinstance(node, ast.Call) and dotted(node.func) in INVARIANTS:
        return
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
                continue  # a part of what has been read
            passed_on = spoken and isinstance(node, (ast.BinOp, ast.IfExp, ast.List))
            said = isinstance(node, ast.Call) and field == "args" and (raised or speaks(node))
            said |= isinstance(node, ast.keyword) and node.arg in ("message", "msg")
            yield from literals(child, passed_on or said, raised=isinstance(node, ast.Raise))


def messages_of(source: str, where: str = "source") -> list[Message]:
    found = ((line, normalised(text)) for line, text in literals(ast.parse(source)))
    return [
        Message(text, f"{where}:{line}") for line, text in found if re.search(r"[^\W\d_]", text)
    ]


def messages() -> list[Message]:
    """Those of the whole package."""
    return [
        message
        for path in sorted((ROOT / "gpflow_hybrid").rglob("*.py"))
        for message in messages_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


# Quotations from the page


class Entry(NamedTuple):
    heading: str
    body: str


def code_spans(markdown: str) -> list[str]:
    markdown = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return [
        normalised(span.strip().replace("\\|", "|"))
        for _, span in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", markdown, flags=re.DOTALL)
    ]


def entries(markdown: str) -> list[Entry]:
    parts = re.split(r"^### (.*)$", markdown, flags=re.MULTILINE)[1:]
    bodies = (re.split(r"^## ", body, flags=re.MULTILINE)[0] for body in parts[1::2])
    return [Entry(heading, body) for heading, body in zip(parts[::2], bodies, strict=True)]


def fixed(text: str) -> str:
    return text.replace(VALUE, "").strip(" .,:;")


def quotes(span: str, message: str) -> bool:
    """Whether a code span has the beginning of a message, or all of it."""
    enough = min(RECOGNISABLE, len(fixed(message)))
    return len(fixed(span)) >= enough and message.startswith(span.rstrip(VALUE + " "))


def unquoted(markdown: str, known: list[Message]) -> list[str]:
    spans = code_spans(markdown)
    return [
        f"{message.where}: {message.text}"
        for message in known
        if not any(quotes(span, message.text) for span in spans)
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def known() -> list[Message]:
    return messages()


# The page


def test_every_message_has_an_entry(page: str, known: list[Message]) -> None:
    assert unquoted(page, known) == []


def test_every_entry_has_a_message(page: str, known: list[Message]) -> None:
    stale = [
        span
        for entry in entries(page)
        for span in code_spans(entry.heading)
        if not any(quotes(span, message.text) for message in known)
    ]
    assert stale == []


def test_every_entry_has_a_cause_and_a_remedy(page: str) -> None:
    assert len(entries(page)) > 100
    incomplete = [
        entry.heading
        for entry in entries(page)
        if entry.body.count("**Cause.**") != 1 or entry.body.count("**Remedy.**") != 1
    ]
    assert incomplete == []


def test_no_entry_can_be_left_out(page: str, known: list[Message]) -> None:
    """Each is the only one to quote some message."""
    found = entries(page)
    rest = page
    for entry in found:
        rest = rest.replace(f"### {entry.heading}{entry.body}", "")
    places = [code_spans(rest), *(code_spans(entry.heading + entry.body) for entry in found)]
    needed = set()
    for message in known:
        quoting = [
            i for i, spans in enumerate(places) if any(quotes(span, message.text) for span in spans)
        ]
        needed |= set(quoting) if len(quoting) == 1 else set()
    superfluous = [
        entry.heading
        for i, entry in enumerate(found, start=1)
        if code_spans(entry.heading) and i not in needed
    ]
    assert superfluous == []


# The reader of the source


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise ValueError("No.")', ["No."]),
        ('raise KeyError(f"{key!r} is unknown") from None', ["… is unknown"]),
        ('raise Refusal("No.")', ["No."]),
        (
            'raise ValueError("a b c d " f"of {x:.3g}, " "found") from error',
            ["a b c d of …, found"],
        ),
        ('return errors.NonFiniteError("NaN at " + where)', ["NaN at"]),
        ('warnings.warn(f"{name} is old", FutureWarning)', ["… is old"]),
        ('logger.warning("%s is old", name)', ["%s is old"]),
        ('tf.debugging.Assert(ok, ["bad lr", lr])', ["bad lr"]),
        ('tf.print("gpflow_hybrid: slow", x)', ["gpflow_hybrid: slow"]),
        ('Result(message=f"It went {how} here.")', ["It went … here."]),
        ('tf.debugging.assert_positive(x, message="Not positive")', ["Not positive"]),
        ('def _remedy():\n    return "Pass Y - 1."', ["Pass Y - 1."]),
        ('remarks += f" It is as after {n}."', ["It is as after …."]),
        ('raise ValueError("odd" if n % 2 else "even")', ["odd", "even"]),
        ('raise AssertionError("this is unreachable")', []),
        ("raise", []),
        ("raise error", []),
        ("raise KeyboardInterrupt", []),
        ('"""A docstring of many words."""', []),
        ('def f(x):\n    """Two words and more."""\n    return x["long key"]', []),
        ('def __str__(self):\n    return "a label of many words"', []),
        ('@check_shapes("X: [N, D]", "return: [batch of many]")\ndef f(X): ...', []),
        ('@abc.abstractmethod\ndef f(self):\n    raise NotImplementedError("say how it is")', []),
    ],
)
def test_reading_messages(source: str, expected: list[str]) -> None:
    assert [message.text for message in messages_of(source)] == expected


@pytest.mark.parametrize(
    ("span", "is_quoted"),
    [
        ("`… must be a positive integer; found …`", True),
        ("`… must be a positive integer`", True),
        ("`… must be a\npositive integer`", True),
        ("`… must be`", False),
        ("`… must be a positive number; found …`", False),
        ("… must be a positive integer; found …", False),
        ("```\n… must be a positive integer; found ….\n```", False),
    ],
)
def test_reading_quotations(span: str, is_quoted: bool) -> None:
    source = 'raise ValueError(f"{name} must be a positive integer; found {value!r}.")'
    page = textwrap.dedent(f"### Heading\n\n{span}\n")
    assert (unquoted(page, messages_of(source)) == []) == is_quoted
