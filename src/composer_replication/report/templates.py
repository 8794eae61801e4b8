"""The templates that lie beside this module, and what every page has in common."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

import jinja2

# C0 and C1 controls but tab and newline, marks that reorder or hide text, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def report_resource(name: str) -> str:
    """A style sheet or template that lies beside this module."""
    return resources.files("composer_replication.report").joinpath(name).read_text(encoding="utf-8")


@cache
def template(name: str) -> jinja2.Template:
    """A template; all but Markdown escapes what it is given."""
    environment = jinja2.Environment(
        autoescape=not name.endswith(".md.j2"),  # noqa: S701  what a card may hold is escaped by ``_cells``
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["at"] = "{:.1f}".format  # a position in a picture
    return environment.from_string(report_resource(name))


def html_page(name: str, /, **values: object) -> str:
    """A page that runs no script and loads nothing: its policy allows one style sheet, named by its hash."""
    css = report_resource("report.css")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return visible(template(name).render(css=css, policy=policy, **values))


def visible(page: str) -> str:
    r"""Make characters that reorder, hide or break text readable: U+202E becomes ``\u202e``."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), page)
