"""A hook of mkdocs: formulas become MathML when the site is built, which browsers show without a script or a font.

$\\rho_t$            <span class="arithmatex">\\(\\rho_t\\)</span>   of pymdownx.arithmatex    <math>...</math>
$$L = -\\rho A$$     <div class="arithmatex">\\[L = ...\\]</div>                              <math display="block">
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)
LEFT_OVER = re.compile(r"\\[A-Za-z]+")


def on_page_content(content: str, /, *, page: object, **_: object) -> str:
    """Return a page with its formulas as MathML. Raises ValueError for a command that is unknown."""

    def as_mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match[2]).strip()
        block = match[1] == "div"
        found = convert(latex, display="block" if block else "inline")
        if LEFT_OVER.search(found):
            raise ValueError(f"{page}: no MathML for {latex}")
        return f'<div class="formula">{found}</div>' if block else found

    return FORMULA.sub(as_mathml, content)
