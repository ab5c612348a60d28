"""Where the documentation explains an error."""

#: The site that ``make docs`` builds; the same as in pyproject.toml, which a test compares.
DOCUMENTATION = "https://liger-losses.github.io/liger-losses/"


def see(heading: str) -> str:
    """The end of an error's text: its heading in docs/errors.md, by the anchor that the site gives to it."""
    return f" See {DOCUMENTATION}errors/#{heading}"
