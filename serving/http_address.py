"""Host and port in an address of HTTP."""


def authority(host: str, port: int) -> str:
    """Return host and port as they stand in a URL and in the header Host: a number of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
