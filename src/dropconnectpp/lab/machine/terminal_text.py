"""Text that others wrote, made safe to show: file names, class names and labels may hold terminal escapes."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with every character that does not print written as its escape; line ends stay.

    Escapes can move the cursor, recolour what follows, rename the window or type into some terminals. Marks that turn
    the direction of writing round can make one file name look like another.

    >>> print(printable("cat\x1b[31m\u202e.png"))
    cat\x1b[31m\u202e.png
    """
    if text.isprintable():
        return text
    return "".join(
        one if one == "\n" or one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
