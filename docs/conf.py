"""The site of the documents (`make site`): Sphinx reads the Markdown files, the notebooks and the docstrings."""

import re

from vaemem._common import __version__
from vaemem.cli.commands import COMMANDS
from vaemem.cli.parsing import make_parser

project, version = "vaemem", __version__
html_title = f"vaemem {version}"
html_theme = "furo"
html_show_copyright = html_copy_source = False
extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc"]
nb_execution_mode, nb_execution_timeout, nb_execution_raise_on_error = "force", 600, True  # kept without outputs
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # a block may show a part of a program
default_role = "py:obj"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have the types
numpydoc_show_class_members = False  # autodoc lists them
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
DOCUMENT = r"(?<!\]\()(?<![\w`/\[])docs/(([A-Z]+)\.md)"


def prepare(app, docname, source):
    """Link the documents that a text names outside code, and add the commands' help to its page."""
    parts = re.split(r"(^```.*?^```$)", source[0], flags=re.M | re.S)
    parts[::2] = [re.sub(DOCUMENT, r"[docs/\1](/\1)", part) for part in parts[::2]]
    if docname == "site/command_line":
        parser = make_parser(COMMANDS)
        commands = [("", parser), *sorted(parser.commands.items())]
        parts += [f"## vaemem {name}\n\n```text\n{one.format_help()}```\n\n" for name, one in commands]
    source[0] = "".join(parts)


def link_documents(app, what, name, about, options, lines):
    """Link the documents that a docstring names."""
    lines[:] = [re.sub(DOCUMENT, r":doc:`docs/\1 </\2>`", line) for line in lines]


def setup(app):
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", link_documents, priority=0)
