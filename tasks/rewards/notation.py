"""Mathematical notation: an answer out of its wrapping, and in the LaTeX that math-verify reads."""

# ruff: noqa: RUF001

import itertools
import re
import unicodedata
from collections.abc import Iterator

_WRAPPINGS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_BOXES = 20  # that are not closed are tried
_BOX = re.compile(r"\\f?boxed?\s*(?=\{)")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*\{([^{}]*)\}"
)
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": r"\div ", "±": r"\pm ",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "**": "^",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "²": "^{2}", "³": "^{3}", "°": r"^{\circ}",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "ℝ": r"\mathbb{R}", r"\varnothing": r"\emptyset ", r"\langle": "(", r"\rangle": ")", "⟨": "(", "⟩": ")",
    r"\lbrack": "[", r"\rbrack": "]", r"\displaystyle": "", "{,}": ",", "{:}": ":",
    r"\$": "", r"\!": "", r"\,": " ", r"\;": " ", r"\:": " ", r"\ ": " ", "~": " ",
}  # fmt: skip
_SYMBOL = re.compile(
    "|".join(
        ("(?<!\\\\)" if sign.startswith("\\") else "")
        + re.escape(sign)
        + ("(?![A-Za-z])" if sign[-1].isalpha() else "")
        for sign in _SYMBOLS
    )
)
_REWRITTEN = (
    (r"^\s*(?:\\approx|\\sim|≈|=)", ""),
    (r"(?<![\\A-Za-z])(?:pi)(?![A-Za-z])", r"\\pi "),
    (r"(?<![\\A-Za-z])(?:infinity|inf|oo|Infinity)(?![A-Za-z])", r"\\infty "),
    (r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan)(?![A-Za-z])", r"\\\1 "),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "),
    (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r" \\times "),
    (r"(?<![A-Za-z])([-+]?[0-9]*\.?[0-9]+)[eE]([-+]?[0-9]+)(?![A-Za-z0-9])", r"\1 \\times 10^{\2}"),
    (r"\^\s*\\([dt]?)frac\s*(\{[^{}]*\}|[0-9])\s*(\{[^{}]*\}|[0-9])", r"^{\\frac\2\3}"),
    (r"(?<![0-9./])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}"),
    (r"(?<=[0-9])\s+(?=\\[dt]?frac)", ""),
    (r"(?<![0-9.,])([1-9][0-9]{0,2}(?:[ ,][0-9]{3})+)(?![0-9,])", lambda found: re.sub("[ ,]", "", found.group(1))),
    (r"(?<=[0-9.])\s*\\(?:overline|bar)\s*\{([0-9]{1,20})\}", r"(\1)"),
    (r"([0-9]*)\.([0-9]*)\(([0-9]{1,20})\)", lambda found: _repeating(*found.groups())),
    (r"\\sqrt\s*\(([^()]*)\)|(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", lambda found: rf"\sqrt{{{found[1] or found[2]}}}"),
    (r"\\text\s*\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])", ","),
    (r",\s*,", ","),
)  # fmt: skip


def boxed(text: str) -> str | None:
    """The content of the last box in a text; None if there is none, or none that is closed."""
    return next(_boxes(text), None)


def unwrapped(text: str) -> str:
    """An answer without the box, the mathematical brackets and the emphasis around all of it, and a full stop."""
    text = text.strip()
    while True:
        inner = boxed(text) if _BOX.match(text) and text.endswith("}") else None
        for begin, end in _WRAPPINGS:
            body = text[len(begin) : len(text) - len(end)]
            if text.startswith(begin) and text.endswith(end) and body.strip() and begin not in body and end not in body:
                inner = body
                break
        if inner is None:
            return re.sub(r"(?<!\\)[.;,]$", "", text).strip()
        text = inner.strip()


def detexted(text: str) -> str:
    r"""A text without the commands around words, such as \text{...}."""
    while (found := _TEXT.sub(r" \1 ", text)) != text:
        text = found
    return re.sub(r"\s+", " ", re.sub(r"(?<!\\)\\[ ,;:!]|~", " ", text)).strip()


def words_of(text: str) -> str:
    """A text as it is compared with another: of one case, without an article, quotes and a full stop."""
    plain = unicodedata.normalize("NFKC", detexted(text)).casefold().strip(" .,;:!\"'`*")
    return re.sub(r"\s+", " ", re.sub(r"^(?:the|an|a) ", "", plain))


def is_balanced(text: str) -> bool:
    """True if every brace is closed."""
    signs = re.sub(r"\\[{}]", "", text)
    depths = list(itertools.accumulate({"{": 1, "}": -1}.get(sign, 0) for sign in signs))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def latex(text: str) -> str:
    """An expression as LaTeX, from LaTeX, plain text or both."""
    text = _SYMBOL.sub(lambda found: _SYMBOLS[found.group()], text)
    for pattern, replaced in _REWRITTEN:
        text = re.sub(pattern, replaced, text)
    return re.sub(r"([(\[])\s+", r"\1", text).strip()


def _boxes(text: str) -> Iterator[str]:
    """The contents of boxes, the last one first."""
    for found in list(_BOX.finditer(text))[: -_BOXES - 1 : -1]:
        depth = 0
        for place in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if depth == 0:
                yield text[found.end() + 1 : place]
                break


def _repeating(whole: str, fixed: str, period: str) -> str:
    r"""0.1(6) as \frac{15}{90}."""
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}" or "0")
    return rf"\frac{{{above}}}{{{below}}}"
