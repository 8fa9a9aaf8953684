"""The token of a server, in a file that both its server and its clients read."""

from pathlib import Path

from dataloading.dataset.documents import read_text


def read_token(path: str | None) -> str | None:
    """Return the token of a file, None without one; ValueError if there is none in it."""
    if path is None:
        return None
    try:
        token = read_text(Path(path), 1 << 16).strip()
    except OSError as error:
        raise ValueError(f"token_file={path} cannot be read ({error.strerror})") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"token_file={path}: want one line of printable ASCII characters")
    return token
