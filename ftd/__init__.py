"""ftd: a weight daemon for inference hosts. The library that daemon and client share, and the daemon itself."""

from ftd._version import PROTOCOL, __version__

__all__ = ["PROTOCOL", "__version__"]
