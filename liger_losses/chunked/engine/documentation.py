"""Where the documentation explains an error."""

#: The site that ``make docs`` builds; the same as in pyproject.toml, which a test compares.
DOCUMENTATION = "https://liger-losses.github.io/liger-losses/"


def see(heading: str) -> str:
    """The end of an error's text: its heading in the repository, and by the same anchor on the site."""
    return f" See docs/errors.md#{heading} in the repository, or {DOCUMENTATION}errors/#{heading}"
